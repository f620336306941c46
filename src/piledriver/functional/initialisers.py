"""Initialisers: callables of a key, a shape, a dtype and a device; each builder returns one, which compares by value.

Kernels have their inputs in the dimension before the last and their outputs in the last, as in flax; `in_dims` and
`out_dims` say otherwise. Truncated normals are cut at two deviations and rescaled to the asked one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from piledriver.core.errors import UsageError, suggest
from piledriver.functional.frame import Initialiser
from piledriver.functional.random.keys import Key, normal, truncated_normal, uniform

Dims = int | Sequence[int]
# The standard deviation of a standard normal that is cut at +-2.
_TRUNCATED_DEVIATION = 0.87962566103423978


def zeros(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros."""
    return torch.zeros(shape, dtype=dtype, device=device)


def ones(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ones."""
    return torch.ones(shape, dtype=dtype, device=device)


class DrawRecipe(NamedTuple):
    """What an initialiser was made from: it is pickled in place of the initialiser."""

    draw: Callable[..., Tensor]
    settings: tuple[Any, ...]


@functools.cache
def initialiser(draw: Callable[..., Tensor], *settings: Any) -> Initialiser:
    """Return `draw(key, shape, dtype, device, *settings)` as a function of its first four arguments.

    A function, because a compiler takes no other objects as defaults of fields; one object for equal settings, so that
    modules compare by value.
    """

    def init(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        return draw(key, shape, dtype, device, *settings)

    init.recipe = DrawRecipe(draw, settings)  # type: ignore[attr-defined]
    return init


def constant(value: float) -> Initialiser:
    """Initialise every element to one number."""
    return initialiser(_constant, value)


def scaled_normal(stddev: float = 0.01) -> Initialiser:
    """Draw from a normal distribution with this standard deviation."""
    return initialiser(_scaled, normal, stddev)


def scaled_uniform(scale: float = 0.01) -> Initialiser:
    """Draw uniformly from [0, scale)."""
    return initialiser(_scaled, uniform, 1.0, 0.0, scale)


def scaled_truncated_normal(stddev: float = 0.02, bound: float = 2.0) -> Initialiser:
    """Draw from a normal distribution cut at `bound` deviations, not rescaled (as torch's `trunc_normal_`)."""
    return initialiser(_scaled, truncated_normal, stddev, bound)


def variance_scaling(
    scale: float,
    mode: Literal["fan_in", "fan_out", "fan_avg"],
    distribution: Literal["truncated_normal", "normal", "uniform"],
    in_dims: Dims = -2,
    out_dims: Dims = -1,
    batch_dims: Dims = (),
) -> Initialiser:
    """Draw with the variance scale / fan: the family of Glorot, He and LeCun."""
    for name, known in (
        (mode, ("fan_in", "fan_out", "fan_avg")),
        (distribution, ("truncated_normal", "normal", "uniform")),
    ):
        if name not in known:
            raise UsageError(f"variance scaling by {name!r}", fix=suggest(name, known))
    dims = tuple((one,) if isinstance(one, int) else tuple(one) for one in (in_dims, out_dims, batch_dims))
    return initialiser(_variance_scaled, scale, mode, distribution, dims)


lecun_normal = functools.partial(variance_scaling, 1.0, "fan_in", "truncated_normal")
lecun_uniform = functools.partial(variance_scaling, 1.0, "fan_in", "uniform")
# Glorot and Bengio, 2010.
glorot_normal = xavier_normal = functools.partial(variance_scaling, 1.0, "fan_avg", "truncated_normal")
glorot_uniform = xavier_uniform = functools.partial(variance_scaling, 1.0, "fan_avg", "uniform")
# For ReLU (He et al., 2015).
he_normal = kaiming_normal = functools.partial(variance_scaling, 2.0, "fan_in", "truncated_normal")
he_uniform = kaiming_uniform = functools.partial(variance_scaling, 2.0, "fan_in", "uniform")


def orthogonal(scale: float = 1.0) -> Initialiser:
    """Draw a random orthogonal matrix over the last dimension (Saxe et al., 2013)."""
    return initialiser(_orthogonal, scale)


def _constant(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, value: float) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def _scaled(
    key: Key,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    draw: Callable[..., Tensor],
    factor: float,
    *settings: float,
) -> Tensor:
    return draw(key, shape, dtype, *settings, device=device) * factor


def _variance_scaled(
    key: Key,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    scale: float,
    mode: str,
    distribution: str,
    dims: tuple[tuple[int, ...], ...],
) -> Tensor:
    fan_in, fan_out = _fans(shape, dims)
    fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
    deviation = math.sqrt(scale / max(fan, 1.0))
    if distribution == "uniform":
        edge = math.sqrt(3.0) * deviation
        return uniform(key, shape, dtype, -edge, edge, device=device)
    if distribution == "normal":
        return normal(key, shape, dtype, device=device) * deviation
    return truncated_normal(key, shape, dtype, device=device) * (deviation / _TRUNCATED_DEVIATION)


def _fans(shape: tuple[int, ...], dims: tuple[tuple[int, ...], ...]) -> tuple[float, float]:
    if len(shape) < 2:
        return float(math.prod(shape)), float(math.prod(shape))
    every = [dim for group in dims for dim in group]
    if not all(-len(shape) <= dim < len(shape) for dim in every):
        raise UsageError(f"fans over the dims {every} of the shape {shape}", fix="name dims that the shape has")
    inputs, outputs, _ = sizes = [math.prod(shape[dim] for dim in group) for group in dims]
    # A kernel without elements has no fan, and nothing to scale.
    receptive = math.prod(shape) / max(math.prod(sizes), 1)
    return inputs * receptive, outputs * receptive


def _orthogonal(key: Key, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, scale: float) -> Tensor:
    if len(shape) < 2:
        raise UsageError(f"the shape {shape} cannot be orthogonal", fix="use it for matrices and up")
    rows, columns = math.prod(shape[:-1]), shape[-1]
    q, r = torch.linalg.qr(normal(key, (max(rows, columns), min(rows, columns)), torch.float64, device=device))
    q = q * torch.sign(torch.diagonal(r))
    made: Tensor = (scale * (q if rows >= columns else q.T)).reshape(shape).to(dtype)
    return made
