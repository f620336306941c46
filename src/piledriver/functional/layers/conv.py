"""Convolutions with channels last: inputs are (batch, *positions, channels), kernels (*window, inputs, features).

Torch wants channels before positions; the permutation is a view that its kernels know as the channels-last layout, so
nothing is copied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.functional.errors import InputShapeError
from piledriver.functional.frame import Initialiser
from piledriver.functional.initialisers import lecun_normal, zeros
from piledriver.functional.layers.dtypes import promoted
from piledriver.functional.module import Module

Padding = str | int | tuple[tuple[int, int], ...]

_LECUN = lecun_normal()
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class Conv(Module):
    """A convolution over one, two or three dimensions; `groups` of channels, dilation, and four kinds of padding.

    `padding` is "SAME", "VALID", "CIRCULAR" or "CAUSAL" (one dimension), a number, or (low, high) by dimension.
    """

    features: int
    window: tuple[int, ...]
    strides: int | tuple[int, ...] = 1
    padding: Padding = "SAME"
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    use_bias: bool = True
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _LECUN
    bias_init: Initialiser = zeros

    def __call__(self, x: Tensor) -> Tensor:
        """Convolve."""
        rank = _rank(self, x)
        strides, dilation = each(self.strides, rank), each(self.dilation, rank)
        channels = x.shape[-1]
        if channels % self.groups:
            raise InputShapeError(
                self.path, f"{channels} channels do not divide into {self.groups} groups", "choose groups that divide"
            )
        shape = (*self.window, channels // self.groups, self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        x, kernel = promoted(self.dtype, x, kernel)
        pads = resolved_padding(self.padding, x.shape[1:-1], self.window, strides, dilation)
        mode = "circular" if self.padding == "CIRCULAR" else "constant"
        x = padded(x.movedim(-1, 1), pads, mode)
        weight = kernel.movedim((-1, -2), (0, 1))
        out = _CONV[rank](
            x, weight, None if bias is None else bias.to(x.dtype), strides, dilation=dilation, groups=self.groups
        )
        return out.movedim(1, -1)


class ConvTranspose(Module):
    """The convolution of the input spread out by `strides`: it makes the positions more, not fewer."""

    features: int
    window: tuple[int, ...]
    strides: int | tuple[int, ...] = 1
    padding: Padding = "SAME"
    use_bias: bool = True
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _LECUN
    bias_init: Initialiser = zeros

    def __call__(self, x: Tensor) -> Tensor:
        """Convolve the spread input."""
        rank = _rank(self, x)
        strides = each(self.strides, rank)
        kernel = self.param("kernel", self.kernel_init, (*self.window, x.shape[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        x, kernel = promoted(self.dtype, x, kernel)
        # Torch's operator is the gradient of a convolution, which turns the window round; we turn it back.
        weight = kernel.flip(tuple(range(rank))).movedim((-2, -1), (0, 1))
        full = _TRANSPOSED[rank](x.movedim(-1, 1), weight, None, strides)
        pads = [_transposed_padding(self.padding, i, self.window[i], strides[i]) for i in range(rank)]
        # `full` is the result with window - 1 of padding on both sides: cut down (or grow) to what was asked for.
        edges = [(low - (size - 1), high - (size - 1)) for (low, high), size in zip(pads, self.window, strict=True)]
        out = padded(full, edges, "constant").movedim(1, -1)
        return out if bias is None else out + bias.to(out.dtype)


def each(value: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    """One number for every dimension."""
    return (value,) * rank if isinstance(value, int) else tuple(value)


def padded(x: Tensor, pads: list[tuple[int, int]], mode: str) -> Tensor:
    """Pad the trailing dimensions; negative numbers cut."""
    flat = [edge for pair in reversed(pads) for edge in pair]
    return F.pad(x, flat, mode=mode) if any(flat) else x


def resolved_padding(
    padding: Padding, sizes: torch.Size, window: tuple[int, ...], strides: tuple[int, ...], dilation: tuple[int, ...]
) -> list[tuple[int, int]]:
    """(low, high) for every dimension."""
    spans = [(size - 1) * step + 1 for size, step in zip(window, dilation, strict=True)]
    if padding == "VALID":
        return [(0, 0)] * len(window)
    if padding in ("SAME", "CIRCULAR"):
        totals = [
            max((-(-size // stride) - 1) * stride + span - size, 0)
            for size, stride, span in zip(sizes, strides, spans, strict=True)
        ]
        return [(total // 2, total - total // 2) for total in totals]
    if padding == "CAUSAL":
        return [(span - 1, 0) for span in spans]
    if isinstance(padding, int):
        return [(padding, padding)] * len(window)
    if isinstance(padding, str):
        raise InputShapeError((), f"unknown padding {padding!r}", "use SAME, VALID, CIRCULAR, CAUSAL or numbers")
    return [(low, high) for low, high in padding]


def _transposed_padding(padding: Padding, dim: int, size: int, stride: int) -> tuple[int, int]:
    if padding == "SAME":
        total = size + stride - 2
        low = size - 1 if stride > size - 1 else -(-total // 2)
        return low, total - low
    if padding == "VALID":
        total = size + stride - 2 + max(size - stride, 0)
        return size - 1, total - (size - 1)
    if isinstance(padding, int):
        return padding, padding
    if isinstance(padding, str):
        raise InputShapeError((), f"unknown padding {padding!r}", "use SAME, VALID or numbers")
    return padding[dim]


def _rank(module: Conv | ConvTranspose, x: Tensor) -> int:
    rank = len(module.window)
    if rank not in _CONV:
        raise InputShapeError(module.path, f"a window over {rank} dimensions", "use one, two or three")
    if x.ndim != rank + 2:
        raise InputShapeError(
            module.path,
            f"an input of shape {tuple(x.shape)} for a window over {rank} dimensions",
            f"pass (batch, {', '.join(['position'] * rank)}, channels)",
        )
    return rank
