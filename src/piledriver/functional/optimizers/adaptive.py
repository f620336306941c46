"""Adaptive optimizers beside Adam: RMSprop, Adagrad, LAMB and Adafactor, with optax's settings and states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piledriver.functional.errors import TreeStructureError
from piledriver.functional.optimizers.optimizers import (
    EmptyState,
    Leaves,
    Optimizer,
    Rate,
    add_decayed_weights,
    as_held,
    chain,
    no_state,
    on_leaves,
    scale,
    scale_by_adam,
    scale_by_rate,
    stateless,
    trace,
    zero,
    zeros,
)
from piledriver.functional.surgery import Mask
from piledriver.functional.tree import leaves_of, rebuild


class RmsState(NamedTuple):
    """A running mean of squared gradients."""

    nu: Any


class StddevState(NamedTuple):
    """Running means of the gradient and of its square."""

    mu: Any
    nu: Any


class SumState(NamedTuple):
    """The sum of squared gradients so far."""

    sum_of_squares: Any


class FactoredState(NamedTuple):
    """Running means of squared gradients: of rows and columns where a parameter is factored, else of every element."""

    count: Tensor  # type: ignore[assignment]
    v_row: Any
    v_col: Any
    v: Any


class AverageState(NamedTuple):
    """A running mean of updates."""

    count: Tensor  # type: ignore[assignment]
    ema: Any


def rmsprop(
    rate: Rate,
    decay: float = 0.9,
    eps: float = 1e-8,
    *,
    centered: bool = False,
    momentum: float | None = None,
    nesterov: bool = False,
) -> Optimizer:
    """Return RMSprop (Tieleman and Hinton, 2012); `centered` divides by the standard deviation of gradients.

    `eps` is added under the root, and momentum sums steps rather than gradients, as in optax.
    """
    last = stateless(lambda leaves: leaves) if momentum is None else trace(momentum, nesterov)
    return chain(scale_by_rms(decay, eps, centered), scale_by_rate(rate), last)


def adagrad(rate: Rate, initial_accumulator: float = 0.1, eps: float = 1e-7) -> Optimizer:
    """Return Adagrad (Duchi et al., 2011)."""
    return chain(scale_by_sum_of_squares(initial_accumulator, eps), scale_by_rate(rate))


def lamb(
    rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Mask | None = None,
) -> Optimizer:
    """Return LAMB: AdamW whose update of each parameter has the norm of that parameter (You et al., 2019)."""
    decayed = add_decayed_weights(weight_decay, mask)
    return chain(scale_by_adam(b1, b2, eps), decayed, scale_by_trust_ratio(), scale_by_rate(rate))


def adafactor(
    rate: Rate | None = None,
    *,
    min_dim_size_to_factor: int = 128,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    momentum: float | None = None,
    weight_decay_rate: float | None = None,
    eps: float = 1e-30,
    factored: bool = True,
    weight_decay_mask: Mask | None = None,
) -> Optimizer:
    """Return Adafactor: second moments of matrices as rows and columns (Shazeer and Stern, 2018)."""
    parts = [scale_by_factored_rms(factored, decay_rate, decay_offset, min_dim_size_to_factor, eps)]
    if clipping_threshold is not None:
        limit = clipping_threshold
        parts.append(stateless(lambda leaves: [one / (_rms(one) / limit).clamp(min=1.0) for one in leaves]))
    if rate is not None:
        parts.append(scale_by_rate(rate, flip_sign=False))
    if multiply_by_parameter_scale:
        parts.append(_by_parameter(lambda update, own: update * _rms(own).clamp(min=1e-3).to(update.dtype)))
    if momentum is not None:
        parts.append(_average(momentum))
    if weight_decay_rate is not None:
        parts.append(add_decayed_weights(weight_decay_rate, weight_decay_mask))
    return chain(*parts, scale(-1.0))


def scale_by_rms(decay: float = 0.9, eps: float = 1e-8, centered: bool = False) -> Optimizer:
    """Divide gradients by the root of their mean square, or by their standard deviation if `centered`."""

    def init(params: Any) -> RmsState | StddevState:
        return StddevState(zeros(params), zeros(params)) if centered else RmsState(zeros(params))

    def move(leaves: Leaves, state: Any, _: Any, tree: Any) -> tuple[Leaves, RmsState | StddevState]:
        held = leaves_of(state.nu)
        leaves = as_held(leaves, held)
        nu = variance = torch._foreach_addcmul(torch._foreach_mul(held, decay), leaves, leaves, value=1.0 - decay)
        new: RmsState | StddevState = RmsState(rebuild(tree, nu))
        if centered:
            mu = torch._foreach_add(torch._foreach_mul(leaves_of(state.mu), decay), leaves, alpha=1.0 - decay)
            variance = torch._foreach_addcmul(nu, mu, mu, value=-1.0)
            new = StddevState(rebuild(tree, mu), new.nu)
        return torch._foreach_div(leaves, torch._foreach_sqrt(torch._foreach_add(variance, eps))), new

    return on_leaves(init, move)


def scale_by_sum_of_squares(initial_accumulator: float = 0.1, eps: float = 1e-7) -> Optimizer:
    """Divide gradients by the root of the sum of all their squares."""

    def init(params: Any) -> SumState:
        return SumState(rebuild(params, [torch.full_like(leaf, initial_accumulator) for leaf in leaves_of(params)]))

    def move(leaves: Leaves, state: SumState, _: Any, tree: Any) -> tuple[Leaves, SumState]:
        held = leaves_of(state.sum_of_squares)
        leaves = as_held(leaves, held)
        total = torch._foreach_addcmul(held, leaves, leaves)
        factors = [torch.where(one > 0, torch.rsqrt(one + eps), 0.0) for one in total]
        return torch._foreach_mul(leaves, factors), SumState(rebuild(tree, total))

    return on_leaves(init, move)


def scale_by_trust_ratio() -> Optimizer:
    """Scale the update of each parameter to that parameter's norm; where one of the norms is zero, leave it."""

    def scaled(update: Tensor, own: Tensor) -> Tensor:
        norm, own_norm = torch.linalg.vector_norm(update), torch.linalg.vector_norm(own)
        return update * torch.where((norm == 0) | (own_norm == 0), 1.0, own_norm / norm).to(update.dtype)

    return _by_parameter(scaled)


def scale_by_factored_rms(
    factored: bool = True,
    decay_rate: float = 0.8,
    decay_offset: int = 0,
    min_dim_size_to_factor: int = 128,
    eps: float = 1e-30,
) -> Optimizer:
    """Divide gradients by the root of their mean square, which is kept as rows and columns for large matrices."""

    def init(params: Any) -> FactoredState:
        held: list[list[Tensor]] = [[], [], []]
        for leaf in leaves_of(params):
            dims = _factored_dims(leaf, factored, min_dim_size_to_factor)
            shapes: list[Any] = [(1,), (1,), leaf.shape]
            if dims is not None:
                shapes = [_without(leaf, dims[1]), _without(leaf, dims[0]), (1,)]
            for part, shape in zip(held, shapes, strict=True):
                part.append(leaf.new_zeros(shape))
        return FactoredState(zero(params), *(rebuild(params, part) for part in held))

    def move(leaves: Leaves, state: FactoredState, params: Leaves | None, tree: Any) -> tuple[Leaves, FactoredState]:
        steps = (state.count - decay_offset + 1).float()
        decay = 1.0 - steps.pow(-decay_rate)
        moved, made = [], []
        rows, columns, wholes = (leaves_of(one) for one in (state.v_row, state.v_col, state.v))
        for gradient, row, column, whole in zip(leaves, rows, columns, wholes, strict=True):
            square = gradient.square() + eps
            dims = _factored_dims(gradient, factored, min_dim_size_to_factor)
            if dims is None:
                whole = (decay * whole + (1.0 - decay) * square).to(whole.dtype)
                moved.append(gradient * whole.rsqrt())
            else:
                small, large = dims
                row = (decay * row + (1.0 - decay) * square.mean(large)).to(row.dtype)
                column = (decay * column + (1.0 - decay) * square.mean(small)).to(column.dtype)
                relative = row / row.mean(small - 1 if small > large else small, keepdim=True)
                moved.append(gradient * relative.rsqrt().unsqueeze(large) * column.rsqrt().unsqueeze(small))
            made.append((row, column, whole))
        parts = [rebuild(tree, list(part)) for part in zip(*made, strict=True)]
        return moved, FactoredState(state.count + 1, *parts)

    return on_leaves(init, move)


def _average(decay: float) -> Optimizer:
    def init(params: Any) -> AverageState:
        held = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in leaves_of(params)]
        return AverageState(zero(params), rebuild(params, held))

    def move(leaves: Leaves, state: AverageState, _: Any, tree: Any) -> tuple[Leaves, AverageState]:
        held = leaves_of(state.ema)
        new = torch._foreach_add(torch._foreach_mul(held, decay), as_held(leaves, held), alpha=1.0 - decay)
        return new, AverageState(state.count + 1, rebuild(tree, new))

    return on_leaves(init, move)


def _by_parameter(function: Callable[[Tensor, Tensor], Tensor]) -> Optimizer:
    def move(leaves: Leaves, state: EmptyState, params: Leaves | None, tree: Any) -> tuple[Leaves, EmptyState]:
        if params is None:
            raise TreeStructureError("an update that depends on parameters", fix="call update(grads, state, params)")
        return [function(update, own) for update, own in zip(leaves, params, strict=True)], state

    return on_leaves(no_state, move)


def _rms(leaf: Tensor) -> Tensor:
    return leaf.float().square().mean().sqrt()


def _factored_dims(leaf: Tensor, factored: bool, least: int) -> tuple[int, int] | None:
    """Return the second largest and the largest dimension, or None for a leaf that is not factored."""
    by_size = sorted(range(leaf.ndim), key=lambda dim: leaf.shape[dim])
    if not factored or leaf.ndim < 2 or leaf.shape[by_size[-2]] < least:
        return None
    return by_size[-2], by_size[-1]


def _without(leaf: Tensor, dim: int) -> tuple[int, ...]:
    return (*leaf.shape[:dim], *leaf.shape[dim + 1 :])
