"""Bytes of the tensors in the arguments of a collective."""

from __future__ import annotations

from typing import Any

import torch

from piledriver.observe.torch_private import tree_leaves


def collective_bytes(tree: Any) -> int:
    """Return the bytes of the larger side of a collective: its input and output are both arguments.

    >>> collective_bytes((torch.ones(4), [torch.ones(2), torch.ones(1)]))
    16
    """
    if isinstance(tree, torch.Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, list) and all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(tree)):
        return sum(collective_bytes(leaf) for leaf in tree_leaves(tree))
    if isinstance(tree, list | tuple):
        return max(map(collective_bytes, tree), default=0)
    return max(map(collective_bytes, tree.values()), default=0) if isinstance(tree, dict) else 0
