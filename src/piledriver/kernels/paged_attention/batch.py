"""The sequences of a step, as paged attention reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PagedBatch(NamedTuple):
    """New tokens of several sequences, flattened, and where each sequence's cache blocks are."""

    tables: Tensor
    """[rows, blocks] int32: the cache blocks of each sequence in order."""
    starts: Tensor
    """[rows + 1] int32: where the new tokens of each sequence begin among all new tokens, then their number."""
    contexts: Tensor
    """[rows] int32: tokens of each sequence, the new ones included."""
    slots: Tensor
    """[tokens] int64: block * block_size + offset at which each new token's key and value are stored."""
    max_new: int
    """At least the most new tokens of one sequence."""
    max_context: int
    """At least the longest context; a bound, so that captured graphs need not change with it."""
    spans: tuple[tuple[int, int], ...] = ()
    """(new tokens, context) of each row on the host, for the reference."""
    invariant: bool = False
    """Compute every row in the same order whatever the other rows are."""


class Rotation(NamedTuple):
    """What happens to a projection of queries, keys and values before they attend.

    Rows of the projection are grouped by key-value head: `group` queries, the key, the value.
    """

    group: int
    table: Tensor | None = None
    """[positions, rotary_dim]: cosines, then sines; None for no rotation."""
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    """Weights of an RMS norm of each head before the rotation."""
    eps: float = 0.0

    @property
    def has_norm(self) -> bool:
        """Whether queries or keys are normalised."""
        return self.q_norm is not None or self.k_norm is not None


def as_bytes(x: Tensor) -> Tensor:
    """Return fp8 numbers as bytes, which torch can index on every device; other tensors as they are."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
