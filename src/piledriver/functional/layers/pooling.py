"""Pooling with channels last: (batch, *positions, channels)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.functional.errors import InputShapeError
from piledriver.functional.layers.conv import Padding, each, resolved_padding

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def max_pool(
    x: Tensor, window: tuple[int, ...], strides: int | tuple[int, ...] | None = None, padding: Padding = "VALID"
) -> Tensor:
    """The largest number of every window."""
    x, steps = _prepared(x, window, strides, padding, float("-inf"))
    return _MAX[len(window)](x, window, steps).movedim(1, -1)


def min_pool(
    x: Tensor, window: tuple[int, ...], strides: int | tuple[int, ...] | None = None, padding: Padding = "VALID"
) -> Tensor:
    """The smallest number of every window."""
    return -max_pool(-x, window, strides, padding)


def avg_pool(
    x: Tensor,
    window: tuple[int, ...],
    strides: int | tuple[int, ...] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> Tensor:
    """The mean of every window; without `count_include_pad` padding is not counted."""
    y, steps = _prepared(x, window, strides, padding, 0.0)
    out = _AVERAGE[len(window)](y, window, steps)
    if not count_include_pad:
        ones, _ = _prepared(torch.ones_like(x[:1, ..., :1]), window, strides, padding, 0.0)
        out = out / _AVERAGE[len(window)](ones, window, steps)
    return out.movedim(1, -1)


def _prepared(
    x: Tensor, window: tuple[int, ...], strides: int | tuple[int, ...] | None, padding: Padding, fill: float
) -> tuple[Tensor, tuple[int, ...]]:
    rank = len(window)
    if rank not in _MAX or x.ndim != rank + 2:
        raise InputShapeError(
            (), f"pooling {tuple(x.shape)} over a window {window}", "pass (batch, *positions, channels) and 1-3 sizes"
        )
    steps = (1,) * rank if strides is None else each(strides, rank)
    pads = resolved_padding(padding, x.shape[1:-1], window, steps, (1,) * rank)
    flat = [edge for pair in reversed(pads) for edge in pair]
    x = x.movedim(-1, 1)
    return (F.pad(x, flat, value=fill) if any(flat) else x), steps
