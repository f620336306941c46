"""Convolutions with channels last: inputs are (..., *positions, channels), kernels (*window, inputs, features).

torch takes channels before positions; the permutation is a view in torch's channels-last layout, so nothing is copied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.functional.errors import InputShapeError
from piledriver.functional.frame import Initialiser
from piledriver.functional.initialisers import lecun_normal, zeros
from piledriver.functional.layers.linear import promoted
from piledriver.functional.module import Module
from piledriver.functional.tree import Path

Sizes = int | tuple[int, ...]
Padding = str | int | tuple[int | tuple[int, int], ...]

_LECUN = lecun_normal()
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class Conv(Module):
    """A convolution over one, two or three dimensions, with strides, dilation and `groups` of channels.

    `padding` is "SAME" or "VALID", "CIRCULAR" or "REFLECT" (as many positions as a stride of 1 keeps), "CAUSAL" (one
    dimension), a number, or a number or (low, high) for every dimension.
    """

    features: int
    window: Sizes
    strides: Sizes = 1
    padding: Padding = "SAME"
    dilation: Sizes = 1
    groups: int = 1
    use_bias: bool = True
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _LECUN
    bias_init: Initialiser = zeros

    def __call__(self, x: Tensor) -> Tensor:
        window, x, batch = _prepared(self, x)
        rank, channels = len(window), x.shape[-1]
        strides, dilation = each(self.strides, rank, self.path), each(self.dilation, rank, self.path)
        for count, what in ((channels, "channels"), (self.features, "features")):
            if count % self.groups:
                raise InputShapeError(
                    self.path, f"{count} {what} do not divide into {self.groups} groups", "choose groups that divide"
                )
        shape = (*window, channels // self.groups, self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        x, kernel = promoted(self.dtype, x, kernel)
        pads = resolved_padding(self.padding, x.shape[1:-1], window, strides, dilation, self.path)
        x = _filled(x, pads, self.padding, self.path)
        spans = [(size - 1) * step + 1 for size, step in zip(window, dilation, strict=True)]
        if any(size < span for size, span in zip(x.shape[1:-1], spans, strict=True)):
            raise InputShapeError(
                self.path,
                f"{tuple(x.shape[1:-1])} positions, padding counted, for a window that spans {tuple(spans)}",
                "pass a longer input, or padding='SAME'",
            )
        weight = kernel.movedim((-1, -2), (0, 1))
        out = _CONV[rank](
            x.movedim(-1, 1),
            weight,
            None if bias is None else bias.to(x.dtype),
            strides,
            dilation=dilation,
            groups=self.groups,
        )
        return _with_batch(out.movedim(1, -1), batch)


class ConvTranspose(Module):
    """The convolution of the input spread out by `strides`: it makes the positions more, not fewer.

    `padding` is "SAME", "VALID", a number, or a number or (low, high) for every dimension of the spread input.
    """

    features: int
    window: Sizes
    strides: Sizes = 1
    padding: Padding = "SAME"
    use_bias: bool = True
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    kernel_init: Initialiser = _LECUN
    bias_init: Initialiser = zeros

    def __call__(self, x: Tensor) -> Tensor:
        window, x, batch = _prepared(self, x)
        rank = len(window)
        strides = each(self.strides, rank, self.path)
        kernel = self.param("kernel", self.kernel_init, (*window, x.shape[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        x, kernel = promoted(self.dtype, x, kernel)
        # Torch's operator is the gradient of a convolution, which turns the window round; we turn it back.
        weight = kernel.flip(tuple(range(rank))).movedim((-2, -1), (0, 1))
        full = _TRANSPOSED[rank](x.movedim(-1, 1), weight, None, strides)
        pads = _transposed_padding(self.padding, window, strides, self.path)
        # `full` is the result with window - 1 of padding on both sides: cut down (or grow) to what was asked for.
        edges = [(low - (size - 1), high - (size - 1)) for (low, high), size in zip(pads, window, strict=True)]
        out = padded(full, edges).movedim(1, -1)
        return _with_batch(out if bias is None else out + bias.to(out.dtype), batch)


def each(value: Sizes, rank: int, path: Path | None = ()) -> tuple[int, ...]:
    """Return one number for every dimension."""
    if isinstance(value, int):
        return (value,) * rank
    if len(value) != rank:
        raise InputShapeError(path, f"{tuple(value)} for a window over {rank} dimensions", "give one number, or each")
    return tuple(value)


def padded(x: Tensor, pads: list[tuple[int, int]], fill: float = 0.0) -> Tensor:
    """Pad the trailing dimensions with a number; negative counts cut."""
    flat = [edge for pair in reversed(pads) for edge in pair]
    return F.pad(x, flat, value=fill) if any(flat) else x


def resolved_padding(
    padding: Padding,
    sizes: torch.Size,
    window: tuple[int, ...],
    strides: tuple[int, ...],
    dilation: tuple[int, ...],
    path: Path | None = (),
) -> list[tuple[int, int]]:
    """Return (low, high) for every dimension."""
    spans = [(size - 1) * step + 1 for size, step in zip(window, dilation, strict=True)]
    if padding == "VALID":
        return [(0, 0)] * len(window)
    if padding == "SAME":
        totals = [
            max((-(-size // stride) - 1) * stride + span - size, 0)
            for size, stride, span in zip(sizes, strides, spans, strict=True)
        ]
        return [(total // 2, total - total // 2) for total in totals]
    if padding in ("CIRCULAR", "REFLECT"):
        return [((span - 1) // 2, span // 2) for span in spans]
    if padding == "CAUSAL" and len(window) == 1:
        return [(spans[0] - 1, 0)]
    if isinstance(padding, str):
        raise InputShapeError(
            path,
            f"padding {padding!r} over {len(window)} dimensions",
            "use SAME, VALID, CIRCULAR, REFLECT, CAUSAL (one dimension) or numbers",
        )
    return _given_padding(padding, len(window), path)


def _transposed_padding(
    padding: Padding, window: tuple[int, ...], strides: tuple[int, ...], path: Path | None
) -> list[tuple[int, int]]:
    if not isinstance(padding, str):
        return _given_padding(padding, len(window), path)
    if padding not in ("SAME", "VALID"):
        raise InputShapeError(path, f"padding {padding!r} of a transposed convolution", "use SAME, VALID or numbers")
    pads = []
    for size, stride in zip(window, strides, strict=True):
        total = size + stride - 2
        low = size - 1 if padding == "VALID" or stride > size - 1 else -(-total // 2)
        pads.append((low, total + (max(size - stride, 0) if padding == "VALID" else 0) - low))
    return pads


def _given_padding(
    padding: int | tuple[int | tuple[int, int], ...], rank: int, path: Path | None
) -> list[tuple[int, int]]:
    pairs = (padding,) * rank if isinstance(padding, int) else padding
    if len(pairs) != rank:
        raise InputShapeError(path, f"padding {padding} for a window over {rank} dimensions", "give one pair for each")
    return [(one, one) if isinstance(one, int) else (one[0], one[1]) for one in pairs]


def _filled(x: Tensor, pads: list[tuple[int, int]], padding: Padding, path: Path | None) -> Tensor:
    """Return the padded input (batch, *positions, channels); CIRCULAR and REFLECT take edges from the input itself."""
    if padding not in ("CIRCULAR", "REFLECT"):
        return padded(x, [*pads, (0, 0)])
    for dim, (low, high) in enumerate(pads, start=1):
        size = x.shape[dim]
        if size == 0 or (padding == "REFLECT" and size == 1 and low + high > 0):
            raise InputShapeError(path, f"{size} positions to pad by {padding}", "pass a longer input")
        if low + high > 0:
            x = x.index_select(dim, _source_positions(size, low, high, padding == "REFLECT", x.device))
    return x


def _source_positions(size: int, low: int, high: int, is_mirrored: bool, device: torch.device) -> Tensor:
    """Return which input position each padded position copies; padding may exceed the input's size."""
    at = torch.arange(-low, size + high, device=device)
    if not is_mirrored:
        return at % size
    period = max(2 * (size - 1), 1)
    return (size - 1) - ((at % period) - (size - 1)).abs()


def _prepared(module: Conv | ConvTranspose, x: Tensor) -> tuple[tuple[int, ...], Tensor, torch.Size]:
    """Return the window, the input with one batch dimension, and the batch dimensions that it had."""
    window = (module.window,) if isinstance(module.window, int) else tuple(module.window)
    rank = len(window)
    if rank not in _CONV:
        raise InputShapeError(module.path, f"a window over {rank} dimensions", "use one, two or three")
    if x.ndim < rank + 1:
        raise InputShapeError(
            module.path,
            f"an input of shape {tuple(x.shape)} for a window over {rank} dimensions",
            f"pass (batch, {', '.join(['position'] * rank)}, channels)",
        )
    batch = x.shape[: -rank - 1]
    return window, x if len(batch) == 1 else x.reshape(batch.numel(), *x.shape[-rank - 1 :]), batch


def _with_batch(out: Tensor, batch: torch.Size) -> Tensor:
    return out if len(batch) == 1 else out.reshape(*batch, *out.shape[1:])
