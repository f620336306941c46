"""Pooling with channels last: (..., *positions, channels)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.functional.errors import InputShapeError
from piledriver.functional.layers.conv import Padding, Sizes, each, padded, resolved_padding

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def max_pool(x: Tensor, window: Sizes, strides: Sizes | None = None, padding: Padding = "VALID") -> Tensor:
    """Return the maximum of every window; strides default to 1, padding is as for `Conv`."""
    return _pooled(x, window, strides, padding, _MAX, float("-inf"))


def min_pool(x: Tensor, window: Sizes, strides: Sizes | None = None, padding: Padding = "VALID") -> Tensor:
    """Return the minimum of every window."""
    return -max_pool(-x, window, strides, padding)


def avg_pool(
    x: Tensor, window: Sizes, strides: Sizes | None = None, padding: Padding = "VALID", count_include_pad: bool = True
) -> Tensor:
    """Return the mean of every window; without `count_include_pad` padding is not counted."""
    out = _pooled(x, window, strides, padding, _AVERAGE, 0.0)
    if count_include_pad:
        return out
    return out / _pooled(torch.ones_like(x[..., :1]), window, strides, padding, _AVERAGE, 0.0)


def _pooled(
    x: Tensor,
    window: Sizes,
    strides: Sizes | None,
    padding: Padding,
    kinds: Mapping[int, Callable[..., Tensor]],
    fill: float,
) -> Tensor:
    sizes = (window,) if isinstance(window, int) else tuple(window)
    rank = len(sizes)
    if rank not in kinds or x.ndim < rank + 1:
        raise InputShapeError(
            None, f"pooling {tuple(x.shape)} over a window {sizes}", "pass (batch, *positions, channels) and 1-3 sizes"
        )
    if not x.is_floating_point():
        raise InputShapeError(None, f"pooling numbers of {x.dtype}", "cast them, x.float()")
    if isinstance(padding, str) and padding not in ("SAME", "VALID"):
        raise InputShapeError(None, f"pooling with padding {padding!r}", "use SAME, VALID or numbers")
    steps = (1,) * rank if strides is None else each(strides, rank, None)
    batch, kept = x.shape[: -rank - 1], x.shape[-rank - 1 :]
    pads = resolved_padding(padding, kept[:-1], sizes, steps, (1,) * rank, None)
    edged = padded(x.reshape(batch.numel(), *kept), [*pads, (0, 0)], fill)
    if any(size < span for size, span in zip(edged.shape[1:-1], sizes, strict=True)):
        raise InputShapeError(
            None, f"{tuple(kept[:-1])} positions for a window {sizes}", "pass a longer input, or padding='SAME'"
        )
    out = kinds[rank](edged.movedim(-1, 1), sizes, steps).movedim(1, -1)
    return out.reshape(*batch, *out.shape[1:])
