"""Optimizers around optimizers: for some parameters, one per label, or one update for several batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.functional.errors import TreeStructureError
from piledriver.functional.optimizers.optimizers import AccumulationState, Optimizer, as_held, zero, zeros
from piledriver.functional.surgery import Mask, is_chosen
from piledriver.functional.tree import Path, Tree, flatten, leaves_of, rebuild, select, unflatten


def masked(inner: Optimizer, mask: Mask) -> Optimizer:
    """Apply the inner optimizer to the parameters that the mask chooses; other updates pass through unchanged."""

    def chosen(tree: Any, params: Any) -> Tree:
        return unflatten({path: leaf for path, leaf in flatten(tree).items() if is_chosen(mask, path, params[path])})

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        shapes = dict(flatten(params if params is not None else grads))
        part = chosen(grads, shapes)
        if not len(part):
            return grads, state
        moved, state = inner.update(part, state, None if params is None else chosen(params, shapes))
        return Tree(grads).merge(moved), state

    return Optimizer(lambda params: inner.init(chosen(params, dict(flatten(params)))), update)


def by_label(
    optimizers: Mapping[str, Optimizer], label: Callable[[Path, Tensor], str] | Mapping[str, Any]
) -> Optimizer:
    """Apply several optimizers, each to the parameters that `label` gives to it; an unknown label is an error.

    `label` is a function of path and leaf, or a tree of labels, one of which stands for everything below it.
    """

    def parts(tree: Any, shapes: Mapping[Path, Tensor]) -> dict[str, Tree]:
        found: dict[str, dict[Path, Any]] = {name: {} for name in optimizers}
        for path, leaf in flatten(tree).items():
            name = label(path, shapes[path]) if callable(label) else _label_of(label, path)
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


def _label_of(labels: Any, path: Path) -> Any:
    for name in path:
        labels = labels.get(name, "(none)") if isinstance(labels, Mapping) else labels
    return labels


def accumulate(inner: Optimizer, every: int) -> Optimizer:
    """Average the gradients of `every` calls and update on the last of them; the other calls return zeros.

    The choice is made on tensors, so that it traces; the inner update is computed in every call and used in one.
    """
    if every < 1:
        raise UsageError(f"accumulate over {every} calls", fix="give a number of calls, 1 or more")

    def init(params: Any) -> AccumulationState:
        return AccumulationState(zero(params), zeros(params), inner.init(params))

    def update(grads: Any, state: AccumulationState, params: Any = None) -> tuple[Any, AccumulationState]:
        before = leaves_of(state.gathered)
        weighted = torch._foreach_mul(as_held(leaves_of(grads), before), 1.0 / every)
        gathered = torch._foreach_add(before, weighted)
        is_last = state.count + 1 == every
        moved, new = inner.update(rebuild(grads, gathered), state.inner, params)
        moves = [torch.where(is_last, move, torch.zeros_like(move)) for move in leaves_of(moved)]
        kept = [torch.where(is_last, torch.zeros_like(one), one) for one in gathered]
        return rebuild(grads, moves), AccumulationState(
            torch.where(is_last, 0, state.count + 1), rebuild(grads, kept), select(is_last, new, state.inner)
        )

    return Optimizer(init, update)
