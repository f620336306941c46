"""Which tensors the C kernels can read: they get addresses, and nothing that torch would check."""

from __future__ import annotations

import torch
from torch import Tensor


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether all tensors that are given are contiguous fp32 in host memory."""
    return all(x is None or (x.is_cpu and x.dtype == torch.float32 and x.is_contiguous()) for x in tensors)
