"""Optimizers as pure pairs: `init(params) -> state`, `update(grads, state, params) -> (updates, state)`.

They compose with `chain`; the arithmetic runs on torch's multi-tensor kernels, one launch for all parameters. States
are trees with the paths of the parameters, and the named ones have the fields that optax's have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piledriver.functional.errors import TreeStructureError
from piledriver.functional.schedules import Schedule
from piledriver.functional.tree import Path, Tree, flatten, leaves_of, map_with_path, rebuild, unflatten

Rate = float | Schedule
Mask = Mapping[str, Any] | Callable[[Path, Tensor], bool]


@dataclass(frozen=True)
class Optimizer:
    """A pair of pure functions."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class EmptyState(NamedTuple):
    """Nothing to remember."""


class CountState(NamedTuple):
    """The number of updates so far."""

    count: Tensor  # type: ignore[assignment]


class AdamState(NamedTuple):
    """Running means of the gradient and of its square."""

    count: Tensor  # type: ignore[assignment]
    mu: Any
    nu: Any


class TraceState(NamedTuple):
    """A running sum of gradients."""

    trace: Any


class LionState(NamedTuple):
    """A running mean of the gradient."""

    mu: Any


class AccumulationState(NamedTuple):
    """Gradients gathered since the last real update."""

    count: Tensor  # type: ignore[assignment]
    gathered: Any
    inner: Any


def apply_updates(params: Any, updates: Any) -> Any:
    """The parameters moved by the updates, each in its own dtype."""
    ours, moves = leaves_of(params), leaves_of(updates)
    if len(ours) != len(moves):
        raise TreeStructureError(
            f"{len(moves)} updates for {len(ours)} parameters", fix="take the gradient with respect to these parameters"
        )
    cast = [move if move.dtype == own.dtype else move.to(own.dtype) for own, move in zip(ours, moves, strict=True)]
    return rebuild(params, torch._foreach_add(ours, cast))


def chain(*optimizers: Optimizer) -> Optimizer:
    """One after another: each gets the updates of the one before."""

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(one.init(params) for one in optimizers)

    def update(grads: Any, state: tuple[Any, ...], params: Any = None) -> tuple[Any, tuple[Any, ...]]:
        made = []
        for one, its in zip(optimizers, state, strict=True):
            grads, new = one.update(grads, its, params)
            made.append(new)
        return grads, tuple(made)

    return Optimizer(init, update)


def stateless(function: Callable[[Any, Any], Any]) -> Optimizer:
    """An optimizer from a function of the gradients and the parameters."""
    return Optimizer(lambda params: EmptyState(), lambda grads, state, params=None: (function(grads, params), state))


def scale(factor: float) -> Optimizer:
    """Times a number."""
    return stateless(lambda grads, _: rebuild(grads, torch._foreach_mul(leaves_of(grads), factor)))


def scale_by_rate(rate: Rate) -> Optimizer:
    """Times minus the learning rate, a number or a schedule of the update count."""
    if not callable(rate):
        return scale(-rate)

    def update(grads: Any, state: CountState, params: Any = None) -> tuple[Any, CountState]:
        moved = torch._foreach_mul(leaves_of(grads), -rate(state.count))
        return rebuild(grads, moved), CountState(state.count + 1)

    return Optimizer(lambda params: CountState(_zero(params)), update)


def clip_by_global_norm(limit: float) -> Optimizer:
    """Scale all gradients down together so that their joint norm is at most the limit."""

    def clipped(grads: Any, params: Any) -> Any:
        factor = torch.clamp(limit / (global_norm(grads) + 1e-6), max=1.0)
        return rebuild(grads, torch._foreach_mul(leaves_of(grads), factor))

    return stateless(clipped)


def clip_by_value(limit: float) -> Optimizer:
    """Cut every number to within +-limit."""
    return stateless(
        lambda grads, _: rebuild(
            grads, torch._foreach_clamp_min(torch._foreach_clamp_max(leaves_of(grads), limit), -limit)
        )
    )


def global_norm(tree: Any) -> Tensor:
    """The norm of all numbers of a tree together, summed in fp32, or in fp64 where a leaf has that."""
    leaves = leaves_of(tree)
    wide = torch.float64 if any(leaf.dtype == torch.float64 for leaf in leaves) else torch.float32
    norms = torch._foreach_norm(leaves, 2.0, dtype=wide)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """The mean gradient over the root of its mean square, both corrected for their start (Kingma and Ba, 2014)."""

    def init(params: Any) -> AdamState:
        return AdamState(_zero(params), _zeros(params), _zeros(params))

    def update(grads: Any, state: AdamState, params: Any = None) -> tuple[Any, AdamState]:
        old_mu, old_nu = leaves_of(state.mu), leaves_of(state.nu)
        leaves = [one.to(own.dtype) for one, own in zip(leaves_of(grads), old_mu, strict=True)]
        count = state.count + 1
        mu = torch._foreach_add(torch._foreach_mul(old_mu, b1), leaves, alpha=1.0 - b1)
        nu = torch._foreach_addcmul(torch._foreach_mul(old_nu, b2), leaves, leaves, value=1.0 - b2)
        root = torch._foreach_sqrt(torch._foreach_mul(nu, 1.0 / _correction(b2, count)))
        moves = torch._foreach_div(torch._foreach_mul(mu, 1.0 / _correction(b1, count)), torch._foreach_add(root, eps))
        return rebuild(grads, moves), AdamState(count, rebuild(grads, mu), rebuild(grads, nu))

    return Optimizer(init, update)


def trace(decay: float, nesterov: bool = False) -> Optimizer:
    """Momentum: a running sum of gradients."""

    def update(grads: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        leaves = leaves_of(grads)
        summed = torch._foreach_add(torch._foreach_mul(leaves_of(state.trace), decay), leaves)
        moves = torch._foreach_add(torch._foreach_mul(summed, decay), leaves) if nesterov else summed
        return rebuild(grads, moves), TraceState(rebuild(grads, summed))

    return Optimizer(lambda params: TraceState(_zeros(params)), update)


def scale_by_lion(b1: float = 0.9, b2: float = 0.99) -> Optimizer:
    """The sign of an interpolated momentum (Chen et al., 2023)."""

    def update(grads: Any, state: LionState, params: Any = None) -> tuple[Any, LionState]:
        leaves, mu = leaves_of(grads), leaves_of(state.mu)
        blended = torch._foreach_add(torch._foreach_mul(mu, b1), leaves, alpha=1.0 - b1)
        new = torch._foreach_add(torch._foreach_mul(mu, b2), leaves, alpha=1.0 - b2)
        return rebuild(grads, torch._foreach_sign(blended)), LionState(rebuild(grads, new))

    return Optimizer(lambda params: LionState(_zeros(params)), update)


def add_decayed_weights(decay: float, mask: Mask | None = None) -> Optimizer:
    """Add the parameters times a number to the updates; `mask` says which (`not_vectors` leaves out biases, norms)."""

    def decayed(grads: Any, params: Any) -> Any:
        if params is None:
            raise TreeStructureError("weight decay without parameters", fix="call update(grads, state, params)")
        return rebuild(grads, torch._foreach_add(leaves_of(grads), leaves_of(params), alpha=decay))

    decay_all = stateless(decayed)
    return decay_all if mask is None else masked(decay_all, mask)


def not_vectors(path: Path, leaf: Tensor) -> bool:
    """True for matrices and up: the usual mask of weight decay."""
    return leaf.ndim > 1


def masked(inner: Optimizer, mask: Mask) -> Optimizer:
    """The inner optimizer on the parameters that the mask chooses; the other updates pass through untouched."""

    def chosen(tree: Any, params: Any) -> Tree:
        return unflatten({path: leaf for path, leaf in flatten(tree).items() if _is_chosen(mask, path, params)})

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        shapes = dict(flatten(params if params is not None else grads))
        own = None if params is None else chosen(params, shapes)
        if own is not None and not len(own):
            return grads, state
        moved, state = inner.update(chosen(grads, shapes), state, own)
        return Tree(grads).merge(moved), state

    return Optimizer(lambda params: inner.init(chosen(params, dict(flatten(params)))), update)


def by_label(optimizers: Mapping[str, Optimizer], label: Callable[[Path, Tensor], str]) -> Optimizer:
    """Several optimizers, each for the parameters that `label` gives to it; unknown labels are an error."""

    def parts(tree: Any, shapes: Mapping[Path, Tensor]) -> dict[str, Tree]:
        found: dict[str, dict[Path, Any]] = {name: {} for name in optimizers}
        for path, leaf in flatten(tree).items():
            name = label(path, shapes[path])
            if name not in found:
                raise TreeStructureError(
                    f"{'.'.join(path)!r} has the label {name!r}", fix=f"use one of {', '.join(optimizers)}"
                )
            found[name][path] = leaf
        return {name: unflatten(leaves) for name, leaves in found.items()}

    def init(params: Any) -> dict[str, Any]:
        trees = parts(params, flatten(params))
        return {name: one.init(trees[name]) for name, one in optimizers.items()}

    def update(grads: Any, state: dict[str, Any], params: Any = None) -> tuple[Any, dict[str, Any]]:
        shapes = flatten(params if params is not None else grads)
        gradients, own = parts(grads, shapes), None if params is None else parts(params, shapes)
        merged, made = Tree(), {}
        for name, one in optimizers.items():
            if not len(gradients[name]):
                made[name] = state[name]
                continue
            moved, made[name] = one.update(gradients[name], state[name], None if own is None else own[name])
            merged = merged.merge(moved)
        return merged, made

    return Optimizer(init, update)


def accumulate(inner: Optimizer, every: int) -> Optimizer:
    """Average the gradients of `every` calls and update on the last of them; the other calls return zeros.

    The choice is made on tensors, so that it traces; the inner update is computed in every call and used in one.
    """

    def init(params: Any) -> AccumulationState:
        return AccumulationState(_zero(params), _zeros(params), inner.init(params))

    def update(grads: Any, state: AccumulationState, params: Any = None) -> tuple[Any, AccumulationState]:
        weighted = torch._foreach_mul(leaves_of(grads), 1.0 / every)
        gathered = torch._foreach_add(leaves_of(state.gathered), weighted)
        is_last = state.count + 1 == every
        moved, new = inner.update(rebuild(grads, gathered), state.inner, params)
        moves = [torch.where(is_last, move, torch.zeros_like(move)) for move in leaves_of(moved)]
        kept = [torch.where(is_last, torch.zeros_like(one), one) for one in gathered]
        return rebuild(grads, moves), AccumulationState(
            torch.where(is_last, 0, state.count + 1), rebuild(grads, kept), _select(is_last, new, state.inner)
        )

    return Optimizer(init, update)


def sgd(rate: Rate, momentum: float = 0.0, nesterov: bool = False) -> Optimizer:
    """Gradient descent, with momentum where it is not zero."""
    return chain(trace(momentum, nesterov), scale_by_rate(rate)) if momentum else scale_by_rate(rate)


def adam(rate: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam."""
    return chain(scale_by_adam(b1, b2, eps), scale_by_rate(rate))


def adamw(
    rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Mask | None = None,
) -> Optimizer:
    """Adam with decay of the weights beside the gradient (Loshchilov and Hutter, 2017)."""
    return chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay, mask), scale_by_rate(rate))


def lion(
    rate: Rate, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 1e-3, mask: Mask | None = None
) -> Optimizer:
    """Lion."""
    return chain(scale_by_lion(b1, b2), add_decayed_weights(weight_decay, mask), scale_by_rate(rate))


def _is_chosen(mask: Mask, path: Path, shapes: Mapping[Path, Tensor]) -> bool:
    if callable(mask):
        return bool(mask(path, shapes[path]))
    node: Any = mask
    for name in path:
        if not isinstance(node, Mapping):
            break
        node = node[name]
    return bool(node)


def _correction(decay: float, count: Tensor) -> Tensor:
    return 1.0 - torch.pow(torch.full_like(count, decay, dtype=torch.float32), count)


def _select(is_last: Tensor, new: Any, old: Any) -> Any:
    fresh, kept = leaves_of(new), leaves_of(old)
    return rebuild(new, [torch.where(is_last, a, b) for a, b in zip(fresh, kept, strict=True)])


def _zero(params: Any) -> Tensor:
    # On the parameters' device, so that no step waits for a copy.
    leaves = leaves_of(params)
    return torch.zeros((), dtype=torch.int32, device=leaves[0].device if leaves else None)


def _zeros(params: Any) -> Any:
    return rebuild(params, [torch.zeros_like(leaf) for leaf in leaves_of(params)])


def mask_tree(mask: Mask, params: Mapping[str, Any]) -> Tree:
    """What a mask chooses, as a tree of booleans: to look at."""
    shapes = flatten(params)
    return map_with_path(lambda path, _: _is_chosen(mask, path, shapes), params)
