"""Host memory on pages of its own, pinned (page-locked) where there is a GPU."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from piledriver.kernels.native.huge_pages import HUGE_PAGE_BYTES

# Smaller tensors are not worth pinning.
_SMALLEST_PINNED = 1 << 16
_WORTH_ALIGNING = 32 << 20


def host_copy(tensor: Tensor, dtype: torch.dtype, *, owner: object, pin: bool = True) -> Tensor:
    """Return a copy in host memory, pinned while its owner lives if there is a GPU.

    torch rounds pinned memory up to a power of two, up to twice the size; so pages are allocated and registered here.
    """
    if not torch.cuda.is_available() or tensor.numel() * dtype.itemsize < _SMALLEST_PINNED:
        return tensor.detach().to("cpu", dtype, copy=True)
    host = page_aligned_empty(tensor.shape, dtype)
    host.copy_(tensor.detach())
    if pin:
        pin_pages(host, owner=owner)
    return host


def pin_pages(host: Tensor, *, owner: object) -> None:
    """Register memory with the CUDA driver while its owner lives; does nothing without a GPU or where it refuses."""
    if not torch.cuda.is_available() or host.numel() == 0:
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)) == 0:
        weakref.finalize(owner, runtime.cudaHostUnregister, host.data_ptr())


def page_aligned_empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised tensor on pages of its own.

    >>> page_aligned_empty(torch.Size((2, 3)), torch.bfloat16).fill_(1).sum()
    tensor(6., dtype=torch.bfloat16)
    """
    size = shape.numel() * dtype.itemsize
    # Linux aligns a mapping to huge pages if its size is a multiple of them; the rest of the last one stays untouched.
    mapped = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if size >= _WORTH_ALIGNING else size
    memory = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # systems without huge pages
        # Fewer pages to fault in, and to lock for every transfer.
        memory.madvise(mmap.MADV_HUGEPAGE, 0, size if mapped == size else size & ~(HUGE_PAGE_BYTES - 1))
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel()).view(shape)
