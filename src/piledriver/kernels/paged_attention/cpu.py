"""Paged attention on a CPU: decoding sequences read their pages in place, those of prefill are gathered at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from piledriver.kernels.attention import ScoreOptions
from piledriver.kernels.paged_attention.batch import PagedBatch
from piledriver.kernels.paged_attention.reference import ReferencePagedAttention, attend_row
from piledriver.kernels.paged_attention.sampled import SampledRows, attend_sampled, sampled_rows, samples


class _Gathered(NamedTuple):
    """One sequence whose pages are copied."""

    start: int
    """Its first new token among all new tokens."""
    new: int
    context: int
    first: int
    """The position of the first key that is copied."""
    blocks: int


class _Plan(NamedTuple):
    """How the queries of a step find their keys, the same in layers of one shape and window."""

    tokens: Tensor
    """Queries that read pages in place."""
    sampled: SampledRows | None
    pieces: Tensor
    """Pieces of pages to copy, [kv_heads, blocks] of each gathered sequence."""
    gathered: list[_Gathered]


class CpuPagedAttention(ReferencePagedAttention):
    """The reference with few copies; in invariant mode, or where dtypes differ, the reference itself."""

    devices = frozenset({"cpu"})

    def __init__(self) -> None:
        self._plans: tuple[PagedBatch | None, dict[tuple[int | None, bool, int, torch.Size], _Plan]] = (None, {})

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
        tokens, sampled, pieces, gathered = self._plan(batch, scores, q, keys)
        if sampled is not None and len(tokens) == len(q):
            return attend_sampled(q.contiguous(), keys, values, sampled, scores.scale)
        out = torch.zeros_like(q)  # also of padding
        if sampled is not None:
            out[tokens] = attend_sampled(q[tokens], keys, values, sampled, scores.scale)
        heads, size, dim = keys.shape[1:]
        k_pages, v_pages = (pages.view(-1, size, dim).index_select(0, pieces) for pages in (keys, values))
        piece = 0
        for start, new, context, first, blocks in gathered:
            part = slice(piece, piece + heads * blocks)
            k, v = (x[part].view(heads, -1, dim)[:, : context - first] for x in (k_pages, v_pages))
            queries = slice(start, start + new)
            out[queries] = attend_row(q[queries], k, v, context - new - first, scores)
            piece = part.stop
        return out

    def _plan(self, batch: PagedBatch, scores: ScoreOptions, q: Tensor, keys: Tensor) -> _Plan:
        """Return the plan of a layer, made once for the layers of a step: they are called with the same batch."""
        plans = self._plans
        if plans[0] is not batch:
            plans = self._plans = batch, {}
        in_place = samples(scores, q.dtype)
        key = scores.window, in_place, q.shape[1], keys.shape
        if key not in plans[1]:
            plans[1][key] = _make_plan(batch, scores.window, in_place, q.shape[1], keys)
        return plans[1][key]


def _make_plan(batch: PagedBatch, window: int | None, in_place: bool, query_heads: int, keys: Tensor) -> _Plan:
    heads, size = keys.shape[1:3]
    start = 0
    single, tokens, pieces, gathered = [], [], [torch.zeros(0, dtype=torch.long)], []
    for row, (count, context) in enumerate(batch.spans):
        if in_place and count == 1:
            single.append(row)
            tokens.append(start)
        else:
            first = 0 if window is None else max(0, context - count - window + 1) // size
            blocks = batch.tables[row, first : -(-context // size)].long()
            pieces.append((torch.arange(heads)[:, None] + blocks * heads).flatten())
            gathered.append(_Gathered(start, count, context, first * size, len(blocks)))
        start += count
    contexts = [batch.spans[row][1] for row in single]
    sampled = sampled_rows(batch.tables[single], contexts, window, query_heads, keys) if single else None
    return _Plan(torch.tensor(tokens, dtype=torch.long), sampled, torch.cat(pieces), gathered)
