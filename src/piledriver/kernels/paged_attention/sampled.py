"""Attention of one query a sequence on a CPU, over keys and values where they lie in their pages.

Scores are a sampled product (SDDMM): a sparse matrix with a row for each head of each query and a column for each row
of the pages. The output is a bag of rows of the value pages, weighted by the softmax of the scores. Nothing is copied
or padded but the scores, and all sequences are computed at once.
"""

from __future__ import annotations

import functools
import warnings
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.attention import ScoreOptions


class SampledRows(NamedTuple):
    """Which rows of the pages the heads of some queries read; buffers of their scores."""

    columns: Tensor
    """[scores] int64: the row of the pages that each score belongs to."""
    offsets: Tensor
    """[queries * heads + 1] int64: where the scores of each head begin."""
    sampled: Tensor
    """[queries * heads, page rows] sparse CSR of both, whose values are overwritten by each layer."""
    places: Tensor
    """[scores] int64: where in `padded` each score is."""
    padded: Tensor
    """[queries * heads, longest context] scores, -inf where there is no key."""


def samples(options: ScoreOptions, dtype: torch.dtype) -> bool:
    """Return whether scores are plain, but for a window, and sparse kernels have the dtype."""
    return dtype == torch.float32 and options.softcap is None and options.slopes is None and options.sinks is None


def sampled_rows(tables: Tensor, contexts: list[int], window: int | None, heads: int, keys: Tensor) -> SampledRows:
    """Return what the last tokens of sequences with these block tables read; `keys` are the pages of a layer."""
    kv_heads, size = keys.shape[1:3]
    ends = torch.tensor(contexts)[:, None]
    begins = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
    counts = ends - begins
    longest = int(counts.max())
    positions = begins + torch.arange(longest)
    first_rows = tables.long().gather(1, positions // size) * (kv_heads * size) + positions % size
    columns = first_rows[:, None] + (torch.arange(heads) // (heads // kv_heads) * size)[:, None]
    places = (positions < ends)[:, None].expand_as(columns).flatten().nonzero()[:, 0]
    columns = columns.flatten()[places]
    offsets = F.pad(counts.repeat_interleave(heads).cumsum(0), (1, 0))
    shape = len(contexts) * heads, keys.shape[0] * kv_heads * size
    _silence_beta_warning()
    sampled = torch.sparse_csr_tensor(offsets, columns, torch.zeros(len(columns)), shape, check_invariants=False)
    padded = torch.full((shape[0], longest), -torch.inf)
    return SampledRows(columns, offsets, sampled, places, padded)


def attend_sampled(q: Tensor, keys: Tensor, values: Tensor, rows: SampledRows, scale: float) -> Tensor:
    """Return the attention of [queries, heads, head_dim] over the rows that each query reads."""
    dim = q.shape[-1]
    k, v = keys.view(-1, dim), values.view(-1, dim)
    torch.sparse.sampled_addmm(rows.sampled, q.view(-1, dim), k.t(), beta=0.0, alpha=scale, out=rows.sampled)
    rows.padded.view(-1).index_copy_(0, rows.places, rows.sampled.values())
    weights = rows.padded.softmax(dim=-1).view(-1).index_select(0, rows.places)
    out = torch.embedding_bag(
        v, rows.columns, rows.offsets, mode=0, per_sample_weights=weights, include_last_offset=True
    )[0]
    return out.view_as(q)


@functools.cache
def _silence_beta_warning() -> None:
    """Make the first sparse CSR tensor of the process, of which torch warns that they are in beta state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor(torch.tensor([0, 0]), torch.tensor([], dtype=torch.long), torch.zeros(0), (1, 1))
