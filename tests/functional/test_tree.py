"""Trees never change, keep one order, and come apart and together again."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import piledriver.functional as F
from piledriver.functional.errors import ImmutableTreeError, TreeStructureError
from piledriver.functional.tree import leaves_of, rebuild

names = st.text("abc_019", min_size=1, max_size=4)
trees = st.recursive(
    st.dictionaries(names, st.integers(), min_size=1, max_size=3),
    lambda below: st.dictionaries(names, below | st.integers(), min_size=1, max_size=3),
    max_leaves=12,
)


@given(trees)
def test_flatten_and_unflatten_are_inverse(data: dict[str, Any]) -> None:
    tree = F.Tree(data)
    assert F.unflatten(F.flatten(tree)) == tree == data
    assert F.unflatten({".".join(path): leaf for path, leaf in F.flatten(tree).items()}) == tree


@given(trees, st.randoms())
def test_order_of_insertion_does_not_matter(data: dict[str, Any], random: Any) -> None:
    items = list(data.items())
    random.shuffle(items)
    one, other = F.Tree(data), F.Tree(dict(items))
    assert list(one) == list(other)
    assert leaves_of(one) == leaves_of(other) == F.tree_leaves(one)
    assert F.tree_map(lambda a, b: a - b, one, other) == F.tree_map(lambda a: 0, one)


@given(trees)
def test_fast_walk_equals_pytree_walk(data: dict[str, Any]) -> None:
    tree = F.Tree(data)
    assert rebuild(tree, [leaf + 1 for leaf in leaves_of(tree)]) == F.tree_map(lambda leaf: leaf + 1, tree)


@given(trees, st.integers())
def test_set_makes_a_new_tree_and_without_takes_it_back(data: dict[str, Any], value: int) -> None:
    tree = F.Tree(data)
    before = tree.to_dict()
    changed = tree.set("new.leaf", value)
    assert changed.at("new.leaf") == value
    assert changed.without("new.leaf") == tree
    assert tree.merge(changed) == changed
    assert tree.to_dict() == before


def test_layers_are_in_natural_order() -> None:
    assert list(F.Tree({f"layers_{i}": i for i in (10, 2, 1)})) == ["layers_1", "layers_2", "layers_10"]


@pytest.mark.parametrize(
    "write",
    [
        lambda tree: tree.__setitem__("a", 1),
        lambda tree: tree.__delitem__("a"),
        lambda tree: tree.update(a=1),
        lambda tree: tree.pop("a"),
        lambda tree: setattr(tree, "a", 1),
        lambda tree: setattr(tree, "_data", {}),
        lambda tree: delattr(tree, "_data"),
        lambda tree: tree.setdefault("b", 1),
        lambda tree: tree.clear(),
    ],
)
def test_writing_is_an_error_that_teaches(write: Any) -> None:
    with pytest.raises(ImmutableTreeError, match=r"immutable.*Fix: .*tree\.set"):
        write(F.Tree({"a": {"b": 1}}))


def test_dicts_that_come_out_are_new() -> None:
    tree = F.Tree({"a": {"b": 1}})
    tree.to_dict()["a"]["b"] = 2
    assert tree.at("a.b") == 1


def test_wrong_paths_name_what_is_there() -> None:
    with pytest.raises(TreeStructureError, match=r"no 'x'.*there is b"):
        F.Tree({"a": {"b": 1}}).at("a.x")
    with pytest.raises(TreeStructureError, match="leaf"):
        F.unflatten({"a": 1, "a.b": 2})

    tree = F.Tree({"kernel": 1})
    with pytest.raises(KeyError, match=r"no 'kernal' here\. Fix: did you mean 'kernel'"):
        tree["kernal"]
    assert tree.get("kernal") is None
    with pytest.raises(TreeStructureError, match="1 cannot be a name"):
        F.Tree({1: 2})
    with pytest.raises(TreeStructureError, match="empty path"):
        tree.set((), 2)
    with pytest.raises(TreeStructureError, match=r"only the other tree has 'a\.b'"):
        F.tree_map(lambda one, other: one, F.Tree({"a": {"c": 1}}), F.Tree({"a": {"c": 1, "b": 2}}))


def test_trees_of_tensors_are_equal_by_their_numbers() -> None:
    tree = F.Tree({"a": {"b": torch.arange(3.0)}, "c": 1})
    assert tree == {"a": {"b": torch.arange(3.0)}, "c": 1}
    assert tree != tree.set("a.b", torch.arange(3.0) + 1)
    assert tree != tree.set("a.b", torch.arange(3))
    assert tree != tree.without("c")


def test_names_that_only_look_like_digits_are_sorted_as_text() -> None:
    assert list(F.Tree({"a²": 1, "a2": 2})) == ["a2", "a²"]


def test_pickles_copies_and_repr() -> None:
    tree = F.Tree({"a": {"b": torch.ones(2, 3)}})
    assert pickle.loads(pickle.dumps(tree)).at("a.b").equal(tree.at("a.b"))
    assert copy.deepcopy(tree).at("a.b").equal(tree.at("a.b"))
    assert repr(tree) == "Tree({'a': {'b': float32[2, 3]}})"


@given(trees)
def test_split_and_merge_are_inverse(data: dict[str, Any]) -> None:
    tree = F.Tree(data)
    even, has_a, rest = F.split_tree(tree, lambda _, leaf: leaf % 2 == 0, lambda path, _: "a" in path)
    assert F.merge_trees(even, has_a, rest) == tree
    assert all(leaf % 2 == 0 for leaf in leaves_of(even))


def test_merge_refuses_the_same_leaf_twice() -> None:
    with pytest.raises(TreeStructureError, match="two of the trees"):
        F.merge_trees({"a": 1}, {"a": 2})


def test_filters_and_maps() -> None:
    tree = F.Tree({"mlp": {"kernel": torch.ones(2, 2), "bias": torch.ones(2)}, "norm": {"scale": torch.ones(2)}})
    vectors = F.select_leaves(tree, F.every(F.has_dims(1), F.invert(F.path_contains("norm"))))
    assert list(F.flatten(vectors)) == [("mlp", "bias")]
    doubled = F.map_where(F.either(F.path_matches("scale$"), F.path_matches("bias$")), lambda leaf: leaf * 2, tree)
    assert doubled.at("norm.scale").sum() == 4
    assert doubled.at("mlp.kernel").sum() == 4
    assert list(F.rename(tree, [(r"^mlp\.", "block.mlp.")])) == ["block", "norm"]


def test_transfer_reports_what_it_did() -> None:
    source = F.Tree(
        {
            "old": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)},
            "extra": torch.ones(1),
            "wide": torch.ones(9),
        }
    )
    target = F.Tree(
        {"new": {"w": torch.zeros(3, 2), "b": torch.zeros(3)}, "flat": torch.zeros(6), "wide": torch.zeros(4)}
    )
    moved, report = F.transfer(source, target, [(r"^old\.", "new.")], adapt={r"w$": lambda value: value.T})
    assert moved.at("new.w").equal(torch.arange(6.0).reshape(2, 3).T)
    assert report.matched == ("new.b", "new.w")
    assert report.missing == ("flat",)
    assert report.left_over == ("extra",)
    assert report.mismatched == (("wide", (9,), (4,)),)
    assert not report.is_complete
    assert "2 matched, 0 reshaped, 1 of another size, 1 missing, 1 left over" in str(report)
    reshaped, report = F.transfer({"flat": torch.arange(6.0).reshape(2, 3)}, {"flat": torch.zeros(6)})
    assert report.reshaped == (("flat", (2, 3), (6,)),)
    assert report.is_complete
    assert reshaped.at("flat").equal(torch.arange(6.0))


def test_transfer_of_plain_values_and_to_shapes_alone() -> None:
    target = {"step": 0, "w": torch.empty(2, device="meta")}
    moved, report = F.transfer({"step": 5, "w": torch.ones(2)}, target)
    assert report.is_complete
    assert moved == {"step": 5, "w": torch.ones(2)}
    with pytest.raises(TreeStructureError, match="w is a int in the source and a Tensor in the target"):
        F.transfer({"w": 5}, target)
