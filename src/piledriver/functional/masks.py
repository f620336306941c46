"""Which parameters: a tree of booleans, or a function of path and leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from piledriver.functional.errors import TreeStructureError
from piledriver.functional.tree import Path, Tree, map_with_path

Mask = Mapping[str, Any] | Callable[[Path, Tensor], bool]


def not_vectors(path: Path, leaf: Tensor) -> bool:
    """True for matrices and up: the usual mask of weight decay."""
    return leaf.ndim > 1


def is_chosen(mask: Mask, path: Path, leaf: Tensor) -> bool:
    """Whether a mask chooses a leaf; a boolean in a tree of booleans stands for everything below it."""
    if callable(mask):
        return bool(mask(path, leaf))
    node: Any = mask
    for name in path:
        if not isinstance(node, Mapping):
            break
        if name not in node:
            raise TreeStructureError(
                f"the mask says nothing about {'.'.join(path)!r}", fix="give it, or what it lies in, True or False"
            )
        node = node[name]
    return bool(node)


def mask_tree(mask: Mask, params: Mapping[str, Any]) -> Tree:
    """What a mask chooses, as a tree of booleans: to look at."""
    return map_with_path(lambda path, leaf: is_chosen(mask, path, leaf), params)
