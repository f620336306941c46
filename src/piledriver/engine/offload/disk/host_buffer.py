"""`HostBuffer`: page-aligned host memory for direct transfers, and the page arithmetic that goes with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piledriver.engine.offload.pinned import page_aligned_empty, pin_pages

PAGE_BYTES = 4096


def whole_pages(nbytes: int) -> int:
    """Return the bytes of whole pages that hold `nbytes`.

    >>> whole_pages(1), whole_pages(4096), whole_pages(4097)
    (4096, 4096, 8192)
    """
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor of bytes."""
    array: Any = tensor.numpy()
    return memoryview(array)


class HostBuffer:
    """Page-aligned host memory for transfers, pinned if there is a GPU.

    >>> HostBuffer(10).tensor(0, (2, 3), torch.float32).zero_().shape
    torch.Size([2, 3])
    """

    def __init__(self, nbytes: int, *, pin: bool = True) -> None:
        self.nbytes = whole_pages(max(nbytes, 1))
        self.bytes = page_aligned_empty(torch.Size((self.nbytes,)), torch.uint8)
        if pin:
            pin_pages(self.bytes, owner=self)
        self.view = memory_of(self.bytes)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the memory at an offset as a tensor."""
        size = torch.Size(shape)
        return self.bytes[offset : offset + size.numel() * dtype.itemsize].view(dtype).view(size)
