"""Normalisation. Statistics are computed in fp32 for every input dtype; the result has the layer's `dtype`."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.functional.errors import InputShapeError
from piledriver.functional.frame import Axes, Initialiser
from piledriver.functional.initialisers import ones, zeros
from piledriver.functional.module import Module


class LayerNorm(Module):
    """Mean 0 and variance 1 over the last dimension (Ba et al., 2016)."""

    epsilon: float = 1e-6
    use_scale: bool = True
    use_bias: bool = True
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    scale_init: Initialiser = ones
    bias_init: Initialiser = zeros
    axes: Axes | None = None

    def __call__(self, x: Tensor) -> Tensor:
        width = (x.shape[-1],)
        scale = self.param("scale", self.scale_init, width, self.param_dtype, self.axes) if self.use_scale else None
        bias = self.param("bias", self.bias_init, width, self.param_dtype, self.axes) if self.use_bias else None
        wide, wide_scale, wide_bias = _wide(x, scale, bias)
        out = F.layer_norm(wide, width, wide_scale, wide_bias, self.epsilon)
        return out.to(_result(self.dtype, x, scale, bias))


class RMSNorm(Module):
    """Root mean square 1 over the last dimension (Zhang and Sennrich, 2019)."""

    epsilon: float = 1e-6
    use_scale: bool = True
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    scale_init: Initialiser = ones
    axes: Axes | None = None

    def __call__(self, x: Tensor) -> Tensor:
        width = (x.shape[-1],)
        scale = self.param("scale", self.scale_init, width, self.param_dtype, self.axes) if self.use_scale else None
        wide, wide_scale = _wide(x, scale)
        out = F.rms_norm(wide, width, wide_scale, self.epsilon)
        return out.to(_result(self.dtype, x, scale))


class GroupNorm(Module):
    """Mean 0 and variance 1 over groups of channels and all positions (Wu and He, 2018). Channels come last.

    `group_size` gives the channels of a group instead of the number of groups; 1 is an instance norm.
    """

    groups: int = 32
    epsilon: float = 1e-6
    use_scale: bool = True
    use_bias: bool = True
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    scale_init: Initialiser = ones
    bias_init: Initialiser = zeros
    group_size: int | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if x.ndim < 2:
            raise InputShapeError(self.path, f"an input of shape {tuple(x.shape)}", "pass (batch, ..., channels)")
        channels = x.shape[-1]
        divisor, what = (self.groups, "groups") if self.group_size is None else (self.group_size, "in a group")
        if divisor < 1 or channels % divisor:
            raise InputShapeError(
                self.path, f"{channels} channels do not divide into {divisor} {what}", "choose a number that divides"
            )
        groups = divisor if self.group_size is None else channels // divisor
        scale = self.param("scale", self.scale_init, (channels,), self.param_dtype) if self.use_scale else None
        bias = self.param("bias", self.bias_init, (channels,), self.param_dtype) if self.use_bias else None
        wide, wide_scale, wide_bias = _wide(x, scale, bias)
        # Not `F.group_norm`, which rejects groups of one number; their result is the bias.
        out = torch.group_norm(wide.movedim(-1, 1), groups, wide_scale, wide_bias, self.epsilon)
        return out.movedim(1, -1).to(_result(self.dtype, x, scale, bias))


class BatchNorm(Module):
    """Mean 0 and variance 1 over the batch (Ioffe and Szegedy, 2015). Channels come last.

    In training (`use_running_average=False`) it normalises by the batch and writes the running averages to the
    collection `batch_stats`: call `apply(..., mutable=["batch_stats"])` and keep what comes back.
    """

    use_running_average: bool | None = None
    momentum: float = 0.99
    epsilon: float = 1e-5
    use_scale: bool = True
    use_bias: bool = True
    dtype: torch.dtype | None = None
    param_dtype: torch.dtype = torch.float32
    scale_init: Initialiser = ones
    bias_init: Initialiser = zeros

    def __call__(self, x: Tensor, use_running_average: bool | None = None) -> Tensor:
        """Normalise; the argument wins over the field of the same name."""
        use_running = self.use_running_average if use_running_average is None else use_running_average
        if use_running is None:
            raise InputShapeError(
                self.path,
                "BatchNorm has no use_running_average",
                "pass use_running_average=True (evaluation) or False (training)",
            )
        channels = x.shape[-1]
        device = x.device
        mean = self.variable("batch_stats", "mean", lambda: torch.zeros(channels, device=device))
        variance = self.variable("batch_stats", "var", lambda: torch.ones(channels, device=device))
        scale = self.param("scale", self.scale_init, (channels,), self.param_dtype) if self.use_scale else None
        bias = self.param("bias", self.bias_init, (channels,), self.param_dtype) if self.use_bias else None
        (wide,) = _wide(x)
        if use_running:
            used_mean, used_variance = mean.value, variance.value
        else:
            dims = tuple(range(x.ndim - 1))
            used_variance, used_mean = torch.var_mean(wide, dims, correction=0)
            if not self.is_initialising:
                for average, new in ((mean, used_mean), (variance, used_variance)):
                    old = average.value
                    average.value = self.momentum * old + (1 - self.momentum) * new.detach().to(old.dtype)
        gain = torch.rsqrt(used_variance + self.epsilon)
        out: Tensor = (wide - used_mean) * (gain if scale is None else gain * scale.to(gain.dtype))
        if bias is not None:
            out = out + bias.to(out.dtype)
        return out.to(_result(self.dtype, x, scale, bias))


def _wide(x: Tensor, *parameters: Tensor | None) -> tuple[Any, ...]:
    """Return all in fp32, or in fp64 if one is fp64: torch's kernels take one dtype."""
    values = (x, *parameters)
    dtype = torch.float64 if any(one is not None and one.dtype == torch.float64 for one in values) else torch.float32
    return tuple(one if one is None or one.dtype == dtype else one.to(dtype) for one in values)


def _result(dtype: torch.dtype | None, *values: Tensor | None) -> torch.dtype:
    return dtype or functools.reduce(torch.promote_types, (value.dtype for value in values if value is not None))
