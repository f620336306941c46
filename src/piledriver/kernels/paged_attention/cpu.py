"""Paged attention on a CPU: the pages of all sequences are gathered by one copy of keys and one of values."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.attention import ScoreOptions
from piledriver.kernels.paged_attention.batch import PagedBatch
from piledriver.kernels.paged_attention.reference import ReferencePagedAttention, attend_row

_Plan = tuple[Tensor, list[tuple[int, int]]]
"""Pieces of pages to copy, [kv_heads, blocks] of each row; first position and blocks of each row."""


class CpuPagedAttention(ReferencePagedAttention):
    """The reference, with one gather a layer; in invariant mode, or where dtypes differ, the reference itself."""

    devices = frozenset({"cpu"})

    def __init__(self) -> None:
        self._plans: tuple[PagedBatch | None, dict[tuple[int | None, int, int], _Plan]] = (None, {})

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        scores: ScoreOptions,
    ) -> Tensor:
        if batch.invariant or keys.dtype != q.dtype:
            return super().__call__(q, keys, values, batch, scores)
        heads, size, dim = keys.shape[1:]
        index, rows = self._plan(batch, scores.window, heads, size)
        k_pages, v_pages = (pages.view(-1, size, dim).index_select(0, index) for pages in (keys, values))
        out, start, piece = torch.empty_like(q), 0, 0
        for (count, context), (first, blocks) in zip(batch.spans, rows, strict=True):
            pieces = slice(piece, piece + heads * blocks)
            k, v = (x[pieces].view(heads, -1, dim)[:, : context - first] for x in (k_pages, v_pages))
            new = slice(start, start + count)
            out[new] = attend_row(q[new], k, v, context - count - first, scores)
            start, piece = start + count, pieces.stop
        if start < len(out):  # padding
            out[start:] = 0
        return out

    def _plan(self, batch: PagedBatch, window: int | None, heads: int, size: int) -> _Plan:
        """Return what to gather, made once for the layers of a step: they are called with the same batch."""
        plans = self._plans
        if plans[0] is not batch:
            plans = self._plans = batch, {}
        key = window, heads, size
        if key not in plans[1]:
            pieces, rows = [], []
            for table, (count, context) in zip(batch.tables, batch.spans, strict=False):
                first = 0 if window is None else max(0, context - count - window + 1) // size
                blocks = table[first : -(-context // size)].long()
                pieces.append((torch.arange(heads)[:, None] + blocks * heads).flatten())
                rows.append((first * size, len(blocks)))
            plans[1][key] = torch.cat(pieces), rows
        return plans[1][key]
