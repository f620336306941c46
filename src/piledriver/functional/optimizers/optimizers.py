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
from piledriver.functional.optimizers.schedules import Schedule
from piledriver.functional.surgery import Mask, is_chosen
from piledriver.functional.tree import Path, Tree, flatten, leaves_of, rebuild

Rate = float | Schedule
Leaves = list[Tensor] | tuple[Tensor, ...]
Move = Callable[[Leaves, Any, Leaves | None, Any], tuple[Leaves, Any]]


@dataclass(frozen=True)
class Optimizer:
    """A pair of pure functions.

    `move(leaves, state, leaves of the params, tree)` is `update` without trees, for those that have one: a chain takes
    its tree apart once, which is most of what a compiler has to trace.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    move: Move | None = None


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


def on_leaves(init: Callable[[Any], Any], move: Move) -> Optimizer:
    """Return an optimizer from its function of the list of leaves; the tree gives paths and structure."""

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        grads = grads if params is None else aligned(grads, params)
        moved, state = move(leaves_of(grads), state, None if params is None else leaves_of(params), grads)
        return rebuild(grads, moved), state

    return Optimizer(init, update, move)


def stateless(function: Callable[[Leaves], Leaves]) -> Optimizer:
    """Return an optimizer that applies a function to the updates and remembers nothing."""
    return on_leaves(no_state, lambda leaves, state, *_: (function(leaves), state))


def chain(*optimizers: Optimizer) -> Optimizer:
    """Apply optimizers one after another: each gets the updates of the one before."""

    def move(leaves: Leaves, state: Any, params: Leaves | None, tree: Any) -> tuple[Leaves, Any]:
        made = []
        for one, its in zip(optimizers, state, strict=True):
            if one.move is not None:
                leaves, new = one.move(leaves, its, params, tree)
            else:
                whole = None if params is None else rebuild(tree, params)
                moved, new = one.update(rebuild(tree, leaves), its, whole)
                leaves = leaves_of(aligned(moved, tree))
            made.append(new)
        return leaves, tuple(made)

    return on_leaves(lambda params: tuple(one.init(params) for one in optimizers), move)


def aligned(given: Any, params: Any, path: Path = ()) -> Any:
    """Return gradients or updates in the order of the parameters; other names or shapes are an error.

    Trees have one order, so of them a compiler need not trace anything.
    """
    if isinstance(params, Tree):
        given = given if isinstance(given, Tree) else Tree(given)
        if torch.compiler.is_compiling() or _is_like(given, params):
            return given
    if not isinstance(params, Mapping):
        if not path or given.shape == params.shape:
            return given
        raise TreeStructureError(
            f"{'.'.join(path)!r} has the shape {tuple(params.shape)}, its update {tuple(given.shape)}", fix=_FROM_THESE
        )
    if not isinstance(given, Mapping) or given.keys() != params.keys():
        wanted, found = dict(flatten(params)), dict(flatten(given)) if isinstance(given, Mapping) else {}
        name = ".".join((*path, *next(iter(wanted.keys() ^ found.keys()), ("?",))))
        raise TreeStructureError(
            f"{len(found)} updates for {len(wanted)} parameters: {name!r} is not in both", fix=_FROM_THESE
        )
    return {name: aligned(given[name], below, (*path, name)) for name, below in params.items()}


def _is_like(given: Tree, params: Tree) -> bool:
    """Return whether two trees have the same names and shapes. Every step calls it, so it calls little."""
    mine, theirs = given._data, params._data
    if mine.keys() != theirs.keys():
        return False
    for name, below in theirs.items():
        one = mine[name]
        if type(below) is Tree:
            if type(one) is not Tree or not _is_like(one, below):
                return False
        elif one.shape != below.shape:
            return False
    return True


_FROM_THESE = "take the gradient with respect to these parameters"


def apply_updates(params: Any, updates: Any) -> Any:
    """Return the parameters plus the updates, each in the parameter's dtype."""
    ours, moves = leaves_of(params), leaves_of(aligned(updates, params))
    cast = [move if move.dtype == own.dtype else move.to(own.dtype) for own, move in zip(ours, moves, strict=True)]
    return rebuild(params, torch._foreach_add(ours, cast))


def scale(factor: float) -> Optimizer:
    """Multiply updates by a number."""
    return stateless(lambda leaves: torch._foreach_mul(leaves, factor))


def scale_by_rate(rate: Rate, flip_sign: bool = True) -> Optimizer:
    """Multiply updates by minus the learning rate, a number or a schedule of the update count."""
    sign = -1.0 if flip_sign else 1.0
    if not callable(rate):
        return scale(sign * rate)

    def move(leaves: Leaves, state: CountState, *_: Any) -> tuple[Leaves, CountState]:
        return torch._foreach_mul(leaves, sign * rate(state.count)), CountState(state.count + 1)

    return on_leaves(lambda params: CountState(zero(params)), move)


def clip_by_global_norm(limit: float) -> Optimizer:
    """Scale all gradients down together so that their joint norm is at most the limit."""

    return stateless(lambda leaves: torch._foreach_mul(leaves, torch.clamp(limit / (_norm(leaves) + 1e-6), max=1.0)))


def clip_by_value(limit: float) -> Optimizer:
    """Clamp every number to +-limit."""

    return stateless(lambda leaves: torch._foreach_clamp_min(torch._foreach_clamp_max(leaves, limit), -limit))


def global_norm(tree: Any) -> Tensor:
    """Return the norm of all numbers of a tree, summed in fp32, or in fp64 if a leaf has that dtype."""
    return _norm(leaves_of(tree))


def _norm(leaves: Leaves) -> Tensor:
    wide = torch.float64 if any(leaf.dtype == torch.float64 for leaf in leaves) else torch.float32
    # Asked for in 32 bits, the sum is made in them: 16-bit leaves need no wide copies.
    total: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(leaves, 2.0, dtype=wide)))
    return total


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Divide the mean gradient by the root of its mean square, both bias-corrected (Kingma and Ba, 2014)."""

    def init(params: Any) -> AdamState:
        return AdamState(zero(params), zeros(params), zeros(params))

    def move(leaves: Leaves, state: AdamState, _: Any, tree: Any) -> tuple[Leaves, AdamState]:
        old_mu, old_nu = leaves_of(state.mu), leaves_of(state.nu)
        leaves = as_held(leaves, old_mu)
        count = state.count + 1
        mu = torch._foreach_add(torch._foreach_mul(old_mu, b1), leaves, alpha=1.0 - b1)
        nu = torch._foreach_addcmul(torch._foreach_mul(old_nu, b2), leaves, leaves, value=1.0 - b2)
        root = torch._foreach_sqrt(torch._foreach_mul(nu, 1.0 / _correction(b2, count)))
        moved = torch._foreach_div(torch._foreach_mul(mu, 1.0 / _correction(b1, count)), torch._foreach_add(root, eps))
        return moved, AdamState(count, rebuild(tree, mu), rebuild(tree, nu))

    return on_leaves(init, move)


def trace(decay: float, nesterov: bool = False) -> Optimizer:
    """Replace gradients by their running sum (momentum)."""

    def move(leaves: Leaves, state: TraceState, _: Any, tree: Any) -> tuple[Leaves, TraceState]:
        held = leaves_of(state.trace)
        leaves = as_held(leaves, held)
        summed = torch._foreach_add(torch._foreach_mul(held, decay), leaves)
        moved = torch._foreach_add(torch._foreach_mul(summed, decay), leaves) if nesterov else summed
        return moved, TraceState(rebuild(tree, summed))

    return on_leaves(lambda params: TraceState(zeros(params)), move)


def scale_by_lion(b1: float = 0.9, b2: float = 0.99) -> Optimizer:
    """Replace gradients by the sign of an interpolated momentum (Chen et al., 2023)."""

    def move(leaves: Leaves, state: LionState, _: Any, tree: Any) -> tuple[Leaves, LionState]:
        mu = leaves_of(state.mu)
        leaves = as_held(leaves, mu)
        blended = torch._foreach_add(torch._foreach_mul(mu, b1), leaves, alpha=1.0 - b1)
        new = torch._foreach_add(torch._foreach_mul(mu, b2), leaves, alpha=1.0 - b2)
        return torch._foreach_sign(blended), LionState(rebuild(tree, new))

    return on_leaves(lambda params: LionState(zeros(params)), move)


def add_decayed_weights(decay: float, mask: Mask | None = None) -> Optimizer:
    """Add the parameters times a number to the updates; `mask` says which (`not_vectors` leaves out biases, norms)."""

    def move(leaves: Leaves, state: EmptyState, params: Leaves | None, tree: Any) -> tuple[Leaves, EmptyState]:
        if params is None:
            raise TreeStructureError("weight decay without parameters", fix="call update(grads, state, params)")
        if mask is None:
            return torch._foreach_add(leaves, params, alpha=decay), state
        paths = enumerate(zip(flatten(tree), params, strict=True))
        chosen = [i for i, (path, own) in paths if is_chosen(mask, path, own)]
        if not chosen:
            return leaves, state
        decayed = torch._foreach_add([leaves[i] for i in chosen], [params[i] for i in chosen], alpha=decay)
        by_place = dict(zip(chosen, decayed, strict=True))
        return [by_place.get(i, leaf) for i, leaf in enumerate(leaves)], state

    return on_leaves(no_state, move)


def sgd(rate: Rate, momentum: float = 0.0, nesterov: bool = False) -> Optimizer:
    """Return gradient descent, with momentum if it is not zero."""
    return chain(trace(momentum, nesterov), scale_by_rate(rate)) if momentum else scale_by_rate(rate)


def adam(rate: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Return Adam (Kingma and Ba, 2014)."""
    return chain(scale_by_adam(b1, b2, eps), scale_by_rate(rate))


def adamw(
    rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: Mask | None = None,
) -> Optimizer:
    """Return Adam with decoupled weight decay (Loshchilov and Hutter, 2017)."""
    return chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay, mask), scale_by_rate(rate))


def lion(
    rate: Rate, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 1e-3, mask: Mask | None = None
) -> Optimizer:
    """Return Lion with decoupled weight decay (Chen et al., 2023)."""
    return chain(scale_by_lion(b1, b2), add_decayed_weights(weight_decay, mask), scale_by_rate(rate))


def as_held(leaves: Leaves, held: Leaves) -> Leaves:
    """Return gradients in the dtypes of the state, so that fp32 gradients of bf16 parameters change no dtype of it."""
    return [one.to(own.dtype) for one, own in zip(leaves, held, strict=True)]


def _correction(decay: float, count: Tensor) -> Tensor:
    return 1.0 - torch.pow(torch.full_like(count, decay, dtype=torch.float32), count)


def no_state(params: Any) -> EmptyState:
    """Return the state of an optimizer that remembers nothing."""
    return EmptyState()


def zero(params: Any) -> Tensor:
    """Return a count of zero on the parameters' device."""
    leaves = leaves_of(params)
    return torch.zeros((), dtype=torch.int32, device=leaves[0].device if leaves else None)


def zeros(params: Any) -> Any:
    """Return a tree of zeros like the parameters."""
    return rebuild(params, [torch.zeros_like(leaf) for leaf in leaves_of(params)])
