"""Which dtype a layer computes in: the one it was given, else what its inputs and parameters promote to."""

from __future__ import annotations

import torch
from torch import Tensor


def promoted(dtype: torch.dtype | None, *values: Tensor) -> list[Tensor]:
    """The tensors in one dtype: `dtype`, or the widest among them."""
    if dtype is None:
        dtype = values[0].dtype
        for value in values[1:]:
            if value.dtype != dtype:
                dtype = torch.promote_types(dtype, value.dtype)
    return [value if value.dtype == dtype else value.to(dtype) for value in values]
