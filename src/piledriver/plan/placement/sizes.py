"""Bytes that a module and its submodules take."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn


def dtype_byte_size(dtype: Any) -> float:
    """Return bytes per element; a boolean counts as one bit."""
    if dtype is torch.bool:
        return 1 / 8
    special = {"INT2": 1 / 4, "INT4": 1 / 2, "FP8": 1}.get(getattr(dtype, "name", ""))
    return special if special is not None else torch.empty((), dtype=dtype, device="meta").element_size()


def compute_module_sizes(
    model: nn.Module, dtype: Any = None, special_dtypes: dict[str, Any] | None = None, buffers_only: bool = False
) -> dict[str, int]:
    """Return bytes by name of every tensor and of every module that holds it; the total is under the empty name."""
    wanted = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    sizes: dict[str, Any] = defaultdict(int)
    tensors: list[tuple[str, torch.Tensor]] = [] if buffers_only else list(model.named_parameters())
    for name, tensor in [*tensors, *model.named_buffers()]:
        size = _bytes_of(name, tensor, wanted, special_dtypes or {})
        parts = name.split(".")
        for depth in range(len(parts) + 1):
            sizes[".".join(parts[:depth])] += size
    return dict(sizes)


def _bytes_of(name: str, tensor: torch.Tensor, wanted: Any, special: dict[str, Any]) -> int:
    own = dtype_byte_size(tensor.dtype)
    if name in special:
        each = dtype_byte_size(special[name])
    elif wanted is None or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        each = own
    else:
        each = min(dtype_byte_size(wanted), own)
    return int(tensor.numel() * each)
