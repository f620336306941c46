"""Write new keys and values to their pages; attend with the fastest kernel that runs on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piledriver.kernels.attention import ScoreOptions
from piledriver.kernels.paged_attention.batch import PagedBatch, as_bytes
from piledriver.kernels.paged_attention.pages import page_scales, round_rows
from piledriver.kernels.registry import fastest_kernel


def write_pages(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store [tokens, kv_heads, head_dim] in [blocks, kv_heads, block_size, head_dim] pages at the given slots."""
    size = keys.shape[2]
    blocks, offsets = slots // size, slots % size
    for pages, new in ((keys, k), (values, v)):
        if pages.dtype == torch.int8:
            pages[blocks, :, offsets], page_scales(pages)[blocks, :, offsets] = round_rows(new)
            continue
        raw = as_bytes(pages)
        raw[blocks, :, offsets] = as_bytes(new.to(pages.dtype)) if raw is not pages else new.to(pages.dtype)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    scores: ScoreOptions,
) -> Tensor:
    """Return the attention of [tokens, heads, head_dim] queries over the pages of their own sequences, causally."""
    kernel: Any = fastest_kernel("paged_attention", q.device)
    out: Tensor = kernel(q, keys, values, batch, scores)
    return out
