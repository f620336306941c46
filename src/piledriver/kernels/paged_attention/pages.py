"""The memory of a paged KV cache: pages of keys or values, and the scales of int8 pages.

An int8 page holds the rows of one head of one block, each the key or value of a token, and behind them an fp32 scale of
each row: largest magnitude / 127. A token has scales of its own, so that what is stored does not depend on others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.native.huge_pages import use_huge_pages

_ALIGNED = 16
"""Bytes at multiples of which the scales and the next page begin: rows are loaded in vectors of this size."""


def allocate_pages(
    blocks: int, heads: int, size: int, width: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """Return zeros of [blocks, heads, size, width]."""
    if dtype != torch.int8:
        return _zeros(blocks, heads, size, width, dtype=dtype, device=device)
    raw = _zeros(blocks, heads, page_bytes(size, width, dtype), dtype=dtype, device=device)
    return raw.as_strided((blocks, heads, size, width), (*raw.stride()[:2], width, 1))


def _zeros(*shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    memory = torch.empty(shape, dtype=dtype, device=device)
    if memory.is_cpu:
        use_huge_pages(memory.data_ptr(), memory.nbytes, written=False)
    return memory.zero_()


def page_bytes(size: int, width: int, dtype: torch.dtype) -> int:
    """Return the bytes of the rows of one head of one block, scales included."""
    if dtype != torch.int8:
        return size * width * dtype.itemsize
    return scales_offset(size, width) + _aligned(4 * size)


def scales_offset(size: int, width: int) -> int:
    """Return where in an int8 page its scales begin, in bytes."""
    return _aligned(size * width)


def page_scales(pages: Tensor) -> Tensor:
    """Return the scales of int8 pages, [blocks, heads, size] fp32, as a view of their memory."""
    blocks, heads, size, width = pages.shape
    begin = (pages.storage_offset() + scales_offset(size, width)) // 4
    strides = (pages.stride(0) // 4, pages.stride(1) // 4, 1)
    view = torch.empty(0, dtype=torch.float32, device=pages.device)
    return view.set_(pages.untyped_storage(), begin, (blocks, heads, size), strides)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of the last dimension as int8, and their scales."""
    largest = x.float().abs().amax(dim=-1)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    return (x.float() / scales[..., None] + 0.5).floor().to(torch.int8), scales


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
