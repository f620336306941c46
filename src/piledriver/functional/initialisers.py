"""Initialisers: functions of a key, a shape, a dtype and a device; each builder returns one.

Kernels have their inputs in the dimension before the last and their outputs in the last, as in flax; `in_dims` and
`out_dims` say otherwise. Truncated normals are cut at two deviations and rescaled to the asked one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from piledriver.core.errors import UsageError, suggest
from piledriver.functional.frame import Initialiser
from piledriver.functional.random.keys import Key, normal, truncated_normal, uniform

Dims = int | Sequence[int]
# The standard deviation of a standard normal that is cut at +-2.
_TRUNCATED_DEVIATION = 0.87962566103423978


def zeros(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """All zeros."""
    return torch.zeros(shape, dtype=dtype, device=device)


def ones(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """All ones."""
    return torch.ones(shape, dtype=dtype, device=device)


def constant(value: float) -> Initialiser:
    """One number everywhere."""

    def init(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return init


def scaled_normal(stddev: float = 0.01) -> Initialiser:
    """Normal with a standard deviation."""

    def init(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return normal(key, shape, dtype, device=device) * stddev

    return init


def scaled_uniform(scale: float = 0.01) -> Initialiser:
    """Uniform in [0, scale)."""

    def init(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return uniform(key, shape, dtype, 0.0, scale, device=device)

    return init


def scaled_truncated_normal(stddev: float = 0.02, bound: float = 2.0) -> Initialiser:
    """Normal with a standard deviation, cut at `bound` deviations (not rescaled, as torch's `trunc_normal_`)."""

    def init(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return truncated_normal(key, shape, dtype, bound, device=device) * stddev

    return init


def variance_scaling(
    scale: float,
    mode: Literal["fan_in", "fan_out", "fan_avg"],
    distribution: Literal["truncated_normal", "normal", "uniform"],
    in_dims: Dims = -2,
    out_dims: Dims = -1,
    batch_dims: Dims = (),
) -> Initialiser:
    """Variance scale / fan: the family of Glorot, He and LeCun."""
    for name, known in (
        (mode, ("fan_in", "fan_out", "fan_avg")),
        (distribution, ("truncated_normal", "normal", "uniform")),
    ):
        if name not in known:
            raise UsageError(f"variance scaling by {name!r}", fix=suggest(name, known))

    def init(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        fan_in, fan_out = _fans(shape, in_dims, out_dims, batch_dims)
        fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
        deviation = math.sqrt(scale / max(fan, 1.0))
        if distribution == "uniform":
            edge = math.sqrt(3.0) * deviation
            return uniform(key, shape, dtype, -edge, edge, device=device)
        if distribution == "normal":
            return normal(key, shape, dtype, device=device) * deviation
        return truncated_normal(key, shape, dtype, device=device) * (deviation / _TRUNCATED_DEVIATION)

    return init


def lecun_normal(in_dims: Dims = -2, out_dims: Dims = -1) -> Initialiser:
    """Variance 1 / fan in; what Dense and Conv use."""
    return variance_scaling(1.0, "fan_in", "truncated_normal", in_dims, out_dims)


def lecun_uniform(in_dims: Dims = -2, out_dims: Dims = -1) -> Initialiser:
    """Variance 1 / fan in, uniform."""
    return variance_scaling(1.0, "fan_in", "uniform", in_dims, out_dims)


def glorot_normal(in_dims: Dims = -2, out_dims: Dims = -1) -> Initialiser:
    """Variance 2 / (fan in + fan out) (Glorot and Bengio, 2010)."""
    return variance_scaling(1.0, "fan_avg", "truncated_normal", in_dims, out_dims)


def glorot_uniform(in_dims: Dims = -2, out_dims: Dims = -1) -> Initialiser:
    """Variance 2 / (fan in + fan out), uniform."""
    return variance_scaling(1.0, "fan_avg", "uniform", in_dims, out_dims)


def he_normal(in_dims: Dims = -2, out_dims: Dims = -1) -> Initialiser:
    """Variance 2 / fan in, for ReLU (He et al., 2015)."""
    return variance_scaling(2.0, "fan_in", "truncated_normal", in_dims, out_dims)


def he_uniform(in_dims: Dims = -2, out_dims: Dims = -1) -> Initialiser:
    """Variance 2 / fan in, uniform."""
    return variance_scaling(2.0, "fan_in", "uniform", in_dims, out_dims)


def orthogonal(scale: float = 1.0) -> Initialiser:
    """A random orthogonal matrix over the last dimension (Saxe et al., 2013)."""

    def init(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if len(shape) < 2:
            raise UsageError(f"the shape {shape} cannot be orthogonal", fix="use it for matrices and up")
        rows, columns = math.prod(shape[:-1]), shape[-1]
        matrix = normal(key, (max(rows, columns), min(rows, columns)), torch.float64, device=device)
        q, r = torch.linalg.qr(matrix)
        q = q * torch.sign(torch.diagonal(r))
        made: Tensor = (scale * (q if rows >= columns else q.T)).reshape(shape).to(dtype)
        return made

    return init


def _fans(shape: tuple[int, ...], in_dims: Dims, out_dims: Dims, batch_dims: Dims) -> tuple[float, float]:
    if len(shape) < 2:
        return float(math.prod(shape)), float(math.prod(shape))

    every = [dim for dims in (in_dims, out_dims, batch_dims) for dim in ((dims,) if isinstance(dims, int) else dims)]
    if not all(-len(shape) <= dim < len(shape) for dim in every):
        raise UsageError(f"fans over the dims {every} of the shape {shape}", fix="name dims that the shape has")

    def size(dims: Dims) -> int:
        return math.prod(shape[dim] for dim in ((dims,) if isinstance(dims, int) else dims))

    # A kernel without elements has no fan, and nothing to scale.
    receptive = math.prod(shape) / max(size(in_dims) * size(out_dims) * size(batch_dims), 1)
    return size(in_dims) * receptive, size(out_dims) * receptive
