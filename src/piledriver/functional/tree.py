"""Immutable trees: nested mappings from names to tensors that never change.

A `Tree` is what `init` returns and `apply` reads. It is a torch pytree, so `torch.func` and `tree_map` take it as it
is. Keys are kept in natural order (`layers_2` before `layers_10`), so that trees with the same names always have the
same structure, however they were made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.functional.errors import ImmutableTreeError, MissingNameError, TreeStructureError

Path = tuple[str, ...]

_DIGITS = re.compile(r"(\d+)")


def _refused(action: str) -> Callable[..., NoReturn]:
    """Return a method that raises the error which names the alternatives."""

    def method(self: Tree, *args: Any, **_: Any) -> NoReturn:
        raise ImmutableTreeError(action.format(*args))

    return method


class Tree(Mapping[str, Any]):
    """A frozen nested mapping. Read it like a dict; change it by making another one.

    >>> tree = Tree({"a": {"b": 1}, "c": 2})
    >>> tree["a"]["b"], tree.at("a.b")
    (1, 1)
    >>> tree.set("a.b", 5)
    Tree({'a': {'b': 5}, 'c': 2})
    >>> tree["c"] = 3
    Traceback (most recent call last):
    ...
    piledriver.functional.errors.ImmutableTreeError: trees are immutable: ... Fix: make a new tree...
    """

    __slots__ = ("_data",)
    _data: dict[str, Any]

    def __init__(self, data: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        items = dict(data)
        for name in items:
            if not isinstance(name, str):
                raise TreeStructureError(f"{name!r} cannot be a name in a tree", fix=f"use text, {str(name)!r}")
        ordered = sorted(items, key=natural) if len(items) > 1 else items
        object.__setattr__(self, "_data", {name: freeze(items[name]) for name in ordered})

    def __getitem__(self, name: str) -> Any:
        try:
            return self._data[name]
        except KeyError:
            raise MissingNameError(name, self._data) from None

    def get(self, name: str, default: Any = None) -> Any:
        return self._data.get(name, default)

    def __eq__(self, other: object) -> bool:
        """Compare names and values; tensors are equal if all their numbers, shape and dtype are."""
        if not isinstance(other, Mapping):
            return NotImplemented
        return self._data.keys() == other.keys() and all(_equal(one, other[name]) for name, one in self._data.items())

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __contains__(self, name: object) -> bool:
        return name in self._data

    def __repr__(self) -> str:
        return f"Tree({{{', '.join(f'{name!r}: {_shown(value)}' for name, value in self._data.items())}}})"

    def __hash__(self) -> int:
        return hash(tuple(self._data))

    def __reduce__(self) -> tuple[Any, ...]:
        return Tree, (thaw(self),)

    def at(self, path: str | Path) -> Any:
        """Return the value under a dotted path."""
        node: Any = self
        for name in split_path(path):
            if not isinstance(node, Mapping) or name not in node:
                raise TreeStructureError(
                    f"no {name!r} on the way to {'.'.join(split_path(path))!r}",
                    fix=f"there is {', '.join(node) if isinstance(node, Mapping) else 'a leaf'}",
                )
            node = node[name]
        return node

    def set(self, path: str | Path, value: Any) -> Tree:
        """Return a tree with one value replaced or added; the rest is shared, not copied."""
        if not split_path(path):
            raise TreeStructureError("an empty path names nothing to set", fix="give the path of a leaf, 'a.b'")
        first, *rest = split_path(path)
        if not rest:
            return Tree({**self._data, first: value})
        below = self._data.get(first, Tree())
        if not isinstance(below, Tree):
            raise TreeStructureError(f"{first!r} is a leaf, so nothing can be set below it", fix="remove it first")
        return Tree({**self._data, first: below.set(tuple(rest), value)})

    def without(self, path: str | Path) -> Tree:
        """Return a tree that lacks one value or subtree; mappings left empty disappear with it."""
        self.at(path)
        first, *rest = split_path(path)
        kept = {name: value for name, value in self._data.items() if name != first}
        below = self._data[first].without(tuple(rest)) if rest else Tree()
        return Tree({**kept, first: below} if len(below) else kept)

    def merge(self, other: Mapping[str, Any]) -> Tree:
        """Return a tree with everything of both; where both have a leaf, the other's wins."""
        merged = dict(self._data)
        for name, value in other.items():
            mine = merged.get(name)
            merged[name] = mine.merge(value) if isinstance(mine, Tree) and isinstance(value, Mapping) else value
        return Tree(merged)

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as new, plain dicts."""
        return {name: thaw(value) for name, value in self._data.items()}

    update, pop, popitem, clear, setdefault = map(
        _refused, ("update()", "pop()", "popitem()", "clear()", "setdefault()")
    )
    __setitem__ = _refused("setting {!r}")
    __delitem__ = _refused("deleting {!r}")
    __setattr__ = _refused("setting the attribute {!r}")
    __delattr__ = _refused("deleting the attribute {!r}")


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.dtype == other.dtype and one.device == other.device and torch.equal(one, other))
    return bool(one == other)


def _shown(value: Any) -> str:
    """Return a leaf as text: tensors by dtype and shape only."""
    if isinstance(value, Tree):
        return "{" + ", ".join(f"{name!r}: {_shown(below)}" for name, below in value.items()) + "}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which `layers_2` comes before `layers_10`."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in _DIGITS.split(name) if part]


def freeze(value: Any) -> Any:
    """Return a mapping as a `Tree`; anything else unchanged."""
    if isinstance(value, Mapping) and not isinstance(value, Tree):
        return Tree(value)
    return value


def thaw(value: Any) -> Any:
    """Return a `Tree` as plain dicts; anything else unchanged."""
    return {name: thaw(below) for name, below in value.items()} if isinstance(value, Tree) else value


def split_path(path: str | Path) -> Path:
    """Return a dotted path as a tuple."""
    return tuple(path.split(".")) if isinstance(path, str) else tuple(path)


def trusted(data: dict[str, Any]) -> Tree:
    """Return a tree around a dict whose keys are in natural order and whose mappings are trees, unchecked."""
    tree = object.__new__(Tree)
    object.__setattr__(tree, "_data", data)
    return tree


def flatten(tree: Mapping[str, Any], prefix: Path = ()) -> dict[Path, Any]:
    """Return leaves by path. Empty mappings vanish.

    >>> flatten(Tree({"a": {"b": 1}}))
    {('a', 'b'): 1}
    """
    found: dict[Path, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found.update(flatten(value, (*prefix, name)))
        else:
            found[(*prefix, name)] = value
    return found


def unflatten(leaves: Mapping[Path, Any] | Mapping[str, Any]) -> Tree:
    """Return the tree with these leaves (paths as tuples or dotted); the inverse of `flatten`.

    >>> unflatten({"a.b": 1})
    Tree({'a': {'b': 1}})
    """
    nested: dict[str, Any] = {}
    for path, value in leaves.items():
        *above, name = split_path(path)
        node = nested
        for step in above:
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                raise TreeStructureError(f"{'.'.join(split_path(path))!r} lies below a leaf", fix="rename one of them")
        if isinstance(node.get(name), dict):
            raise TreeStructureError(f"{'.'.join(split_path(path))!r} is both a leaf and a mapping", fix="rename one")
        node[name] = value
    return Tree(nested)


def map_with_path(function: Callable[[Path, Any], Any], tree: Mapping[str, Any], prefix: Path = ()) -> Tree:
    """Apply `function(path, leaf)` to every leaf.

    >>> map_with_path(lambda path, leaf: ".".join(path), Tree({"a": {"b": 1}}))
    Tree({'a': {'b': 'a.b'}})
    """
    return Tree(
        {
            name: map_with_path(function, value, (*prefix, name))
            if isinstance(value, Mapping)
            else function((*prefix, name), value)
            for name, value in tree.items()
        }
    )


def tree_map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to the leaves of trees of one structure (any torch pytree)."""
    if isinstance(tree, Tree) and not others:
        return rebuild(tree, [function(leaf) for leaf in leaves_of(tree)])
    try:
        return pytree.tree_map(function, tree, *others)
    except ValueError as error:
        difference = _difference(tree, others)
        if difference is None:
            raise
        raise difference from error


def select(condition: Tensor, if_true: Any, if_false: Any) -> Any:
    """Return one of two trees of the same structure, leaf by leaf on a tensor: no branch, so it traces."""
    return pytree.tree_map(lambda a, b: torch.where(condition.to(a.device), a, b), if_true, if_false)


def _difference(tree: Any, others: tuple[Any, ...]) -> TreeStructureError | None:
    """Return the error that names where trees differ, or None."""
    for other in others:
        if isinstance(tree, Mapping) and isinstance(other, Mapping):
            mine, theirs = set(flatten(tree)), set(flatten(other))
            for odd, whose in ((mine - theirs, "first"), (theirs - mine, "other")):
                if odd:
                    return TreeStructureError(
                        f"only the {whose} tree has {'.'.join(min(odd))!r}", fix="map over trees of one structure"
                    )
    return None


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of any torch pytree."""
    return pytree.tree_leaves(tree)


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of any torch pytree, in its order; trees are walked faster than by torch.

    A compiler traces this for every step that it compiles, so it calls little.
    """
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(node: Any, found: list[Any]) -> None:
    if isinstance(node, Tree):
        below: Iterable[Any] = node._data.values()
    elif isinstance(node, tuple) and not isinstance(node, torch.Size):
        below = node
    elif hasattr(type(node), "tree_fields"):
        below = [getattr(node, name) for name in type(node).tree_fields]
    elif node is None:  # a leaf, which torch 2.11 cannot trace the walk of
        found.append(node)
        return
    else:
        found.extend(pytree.tree_leaves(node))
        return
    for value in below:
        if isinstance(value, Tensor):
            found.append(value)
        else:
            _collect(value, found)


def rebuild(tree: Any, leaves: Iterable[Any]) -> Any:
    """Return a tree of the same structure with other leaves; the inverse of `leaves_of`."""
    if not isinstance(tree, Tree):
        return pytree.tree_unflatten(list(leaves), pytree.tree_structure(tree))
    return _filled(tree, iter(leaves))


def _filled(tree: Tree, leaves: Iterator[Any]) -> Tree:
    data = {}
    for name, value in tree._data.items():
        data[name] = _filled(value, leaves) if isinstance(value, Tree) else next(leaves)
    return trusted(data)


pytree.register_pytree_node(
    Tree,
    lambda tree: (list(tree._data.values()), tuple(tree._data)),
    lambda values, names: trusted(dict(zip(names, values, strict=True))),
    serialized_type_name="piledriver.functional.Tree",
    flatten_with_keys_fn=lambda tree: (
        [(pytree.MappingKey(name), value) for name, value in tree._data.items()],
        tuple(tree._data),
    ),
)
