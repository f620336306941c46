"""Tree surgery: filters and masks, split and merge, renaming, and moving weights between architectures."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from piledriver.functional.errors import TreeStructureError
from piledriver.functional.state_dict import placed_like
from piledriver.functional.tree import Path, Tree, flatten, map_with_path, unflatten

Filter = Callable[[Path, Any], bool]
Mask = Mapping[str, Any] | Callable[[Path, Tensor], bool]
"""Which parameters: a tree of booleans, or a function of path and leaf."""


def path_matches(pattern: str) -> Filter:
    """Match dotted paths in which a regular expression is found.

    >>> path_matches(r"bias$")(("mlp", "bias"), None)
    True
    """
    compiled = re.compile(pattern)
    return lambda path, _: compiled.search(".".join(path)) is not None


def path_contains(name: str) -> Filter:
    """Match paths with this name as one of their steps."""
    return lambda path, _: name in path


def has_dims(count: int) -> Filter:
    """Match tensors of this many dimensions."""
    return lambda _, leaf: isinstance(leaf, Tensor) and leaf.ndim == count


def has_dtype(dtype: Any) -> Filter:
    """Match tensors of this dtype."""
    return lambda _, leaf: isinstance(leaf, Tensor) and leaf.dtype == dtype


def every(*filters: Filter) -> Filter:
    """Match what all filters match."""
    return lambda path, leaf: all(one(path, leaf) for one in filters)


def either(*filters: Filter) -> Filter:
    """Match what any filter matches."""
    return lambda path, leaf: any(one(path, leaf) for one in filters)


def invert(chosen: Filter) -> Filter:
    """Match what a filter does not match."""
    return lambda path, leaf: not chosen(path, leaf)


def not_vectors(path: Path, leaf: Tensor) -> bool:
    """Return True for matrices and up: the usual mask of weight decay."""
    return leaf.ndim > 1


def is_chosen(mask: Mask, path: Path, leaf: Tensor) -> bool:
    """Return whether a mask chooses a leaf; in a tree, a boolean stands for everything below it."""
    if callable(mask):
        return bool(mask(path, leaf))
    node: Any = mask
    for name in path:
        if not isinstance(node, Mapping):
            break
        if name not in node:
            raise TreeStructureError(
                f"the mask does not cover {'.'.join(path)!r}", fix="set it, or a mapping above it, to True or False"
            )
        node = node[name]
    return bool(node)


def mask_tree(mask: Mask, params: Mapping[str, Any]) -> Tree:
    """Return what a mask chooses as a tree of booleans."""
    return map_with_path(lambda path, leaf: is_chosen(mask, path, leaf), params)


def select_leaves(tree: Mapping[str, Any], chosen: Filter) -> Tree:
    """Return the part of a tree whose leaves match."""
    return unflatten({path: leaf for path, leaf in flatten(tree).items() if chosen(path, leaf)})


def split_tree(tree: Mapping[str, Any], *filters: Filter) -> tuple[Tree, ...]:
    """Return one tree for each filter (each leaf goes to the first that matches), and one with the rest.

    >>> biases, rest = split_tree(Tree({"a": {"bias": 1, "kernel": 2}}), path_matches("bias$"))
    >>> biases, rest
    (Tree({'a': {'bias': 1}}), Tree({'a': {'kernel': 2}}))
    """
    parts: list[dict[Path, Any]] = [{} for _ in range(len(filters) + 1)]
    for path, leaf in flatten(tree).items():
        index = next((i for i, chosen in enumerate(filters) if chosen(path, leaf)), len(filters))
        parts[index][path] = leaf
    return tuple(unflatten(part) for part in parts)


def merge_trees(*trees: Mapping[str, Any]) -> Tree:
    """Return all leaves in one tree, the inverse of `split_tree`; the same path twice is an error."""
    leaves: dict[Path, Any] = {}
    for tree in trees:
        for path, leaf in flatten(tree).items():
            if path in leaves:
                raise TreeStructureError(
                    f"{'.'.join(path)!r} is in two of the trees", fix="use `tree.merge` to override"
                )
            leaves[path] = leaf
    return unflatten(leaves)


def map_where(chosen: Filter, function: Callable[[Any], Any], tree: Mapping[str, Any]) -> Tree:
    """Apply a function to the leaves that pass; the others stay."""
    return unflatten({path: function(leaf) if chosen(path, leaf) else leaf for path, leaf in flatten(tree).items()})


def rename(tree: Mapping[str, Any], rules: Sequence[tuple[str, str]]) -> Tree:
    """Rename by rules on dotted paths: regular expressions and their replacements, all applied in order."""
    renamed: dict[str, Any] = {}
    for path, leaf in flatten(tree).items():
        name = ".".join(path)
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        if name in renamed:
            raise TreeStructureError(f"two leaves are renamed to {name!r}", fix="make the rules tell them apart")
        renamed[name] = leaf
    return unflatten(renamed)


@dataclass(frozen=True)
class TransferReport:
    """What `transfer` did, by dotted path of the target (of the source for `left_over`)."""

    matched: tuple[str, ...] = ()
    reshaped: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    missing: tuple[str, ...] = ()
    left_over: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = field(default=())

    @property
    def is_complete(self) -> bool:
        """Whether every leaf of the target was filled."""
        return not self.missing and not self.mismatched

    def __str__(self) -> str:
        lines = [
            f"{len(self.matched)} matched, {len(self.reshaped)} reshaped, {len(self.mismatched)} of another size, "
            f"{len(self.missing)} missing, {len(self.left_over)} left over"
        ]
        lines += [f"  reshaped   {name}: {old} -> {new}" for name, old, new in self.reshaped]
        lines += [f"  other size {name}: {old} for {new}" for name, old, new in self.mismatched]
        lines += [f"  missing    {name}" for name in self.missing]
        lines += [f"  left over  {name}" for name in self.left_over]
        return "\n".join(lines)


def transfer(
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    rules: Sequence[tuple[str, str]] = (),
    adapt: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> tuple[Tree, TransferReport]:
    """Fill the target's leaves from a source of another architecture; what finds no match stays as it is.

    `rules` rename source paths; `adapt` maps a pattern of target paths to a function on the value (a transpose, say).
    A value with the right number of elements but another shape is reshaped; one of another size is not used.
    """
    renamed = {".".join(path): leaf for path, leaf in flatten(rename(source, rules)).items()}
    filled: dict[str, Any] = {}
    matched, reshaped, missing, mismatched = [], [], [], []
    used: set[str] = set()
    for path, leaf in flatten(target).items():
        name = ".".join(path)
        filled[name] = leaf
        if name not in renamed:
            missing.append(name)
            continue
        used.add(name)
        value = _adapted(name, renamed[name], adapt or {})
        if not isinstance(leaf, Tensor) or not isinstance(value, Tensor):
            if isinstance(leaf, Tensor) or isinstance(value, Tensor):
                raise TreeStructureError(
                    f"{name} is a {type(value).__name__} in the source and a {type(leaf).__name__} in the target",
                    fix="give it another form with adapt=, or another place with a rule",
                )
            matched.append(name)
            filled[name] = value
            continue
        if value.shape == leaf.shape:
            matched.append(name)
        elif value.numel() == leaf.numel():
            reshaped.append((name, tuple(value.shape), tuple(leaf.shape)))
            value = value.reshape(leaf.shape)
        else:
            mismatched.append((name, tuple(value.shape), tuple(leaf.shape)))
            continue
        filled[name] = placed_like(value, leaf)
    report = TransferReport(
        tuple(matched), tuple(reshaped), tuple(missing), tuple(sorted(set(renamed) - used)), tuple(mismatched)
    )
    return unflatten(filled), report


def _adapted(name: str, value: Tensor, adapt: Mapping[str, Callable[[Tensor], Tensor]]) -> Tensor:
    for pattern, function in adapt.items():
        if re.search(pattern, name):
            try:
                value = function(value)
            except Exception as error:
                error.add_note(f"in adapt of {name}, by the pattern {pattern!r}")
                raise
    return value
