"""Attention of one query a sequence on a CPU, over keys and values where they lie in their pages.

Scores are a sampled product (SDDMM): a sparse matrix with a row for each head of each query and a column for each row
of the pages. The output is a bag of rows of the value pages, weighted by the softmax of the scores. No page is
copied, nothing is padded, and all sequences are computed at once.
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
    scores: list[Tensor]
    """[heads, keys] of each query, views of the values of `sampled`."""


def samples(options: ScoreOptions, dtype: torch.dtype) -> bool:
    """Return whether scores are plain, but for a window, and sparse kernels have the dtype."""
    return dtype == torch.float32 and options.softcap is None and options.slopes is None and options.sinks is None


def sampled_rows(tables: Tensor, contexts: list[int], window: int | None, heads: int, keys: Tensor) -> SampledRows:
    """Return what the last tokens of sequences with these block tables read; `keys` are the pages of a layer."""
    kv_heads, size = keys.shape[1:3]
    begins = [0 if window is None else max(0, context - window) for context in contexts]
    counts = [context - begin for begin, context in zip(begins, contexts, strict=True)]
    heads_first = torch.arange(heads) // (heads // kv_heads) * size
    columns = []
    for table, begin, context in zip(tables.long(), begins, contexts, strict=True):
        positions = torch.arange(begin, context)
        first = table[positions // size].mul_(kv_heads * size).add_(positions % size)
        columns.append((heads_first[:, None] + first).flatten())
    every = torch.cat(columns)
    offsets = F.pad(torch.tensor(counts).repeat_interleave(heads).cumsum(0), (1, 0))
    values = torch.zeros(len(every))
    shape = len(contexts) * heads, keys.shape[0] * kv_heads * size
    _silence_beta_warning()
    sampled = torch.sparse_csr_tensor(offsets, every, values, shape, check_invariants=False)
    parts = torch.split(sampled.values(), [heads * count for count in counts])
    return SampledRows(every, offsets, sampled, [part.view(heads, -1) for part in parts])


def attend_sampled(q: Tensor, keys: Tensor, values: Tensor, rows: SampledRows, scale: float) -> Tensor:
    """Return the attention of [queries, heads, head_dim] over the rows that each query reads."""
    dim = q.shape[-1]
    k, v = keys.view(-1, dim), values.view(-1, dim)
    torch.sparse.sampled_addmm(rows.sampled, q.view(-1, dim), k.t(), beta=0.0, alpha=scale, out=rows.sampled)
    weights = torch.cat([scores.softmax(dim=-1).view(-1) for scores in rows.scores])
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
