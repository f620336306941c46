"""Bytes of the tensors in the arguments of a collective."""

from __future__ import annotations

from typing import Any

import torch


def collective_bytes(tree: Any) -> int:
    """Return the bytes of the larger side of a collective: its input and output are both arguments.

    >>> collective_bytes((torch.ones(4), [torch.ones(2), torch.ones(1)]))
    16
    """
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, tuple):
        largest = 0
        for one in tree:
            if isinstance(one, (torch.Tensor, list, tuple, dict)):
                largest = max(largest, collective_bytes(one))
        return largest
    if isinstance(tree, list):
        if len(tree) == 1:
            return collective_bytes(tree[0])
        return sum(map(collective_bytes, tree))
    return max(map(collective_bytes, tree.values()), default=0) if isinstance(tree, dict) else 0
