"""Recomputation: keep a function's inputs and compute its intermediate values again in the backward pass.

`torch.utils.checkpoint` hooks saved tensors, which `torch.func` does not allow. This is an autograd function whose
backward pass is the vector-Jacobian product of the function itself, so it works under `grad`, `vmap` and their nesting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.functional.errors import TransformError
from piledriver.functional.transforms.tracing import forward_mode_surrounds, inside_functorch, only_autograd_surrounds

Flat = Callable[..., tuple[Any, ...]]


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a backward pass that computes it again; gradients flow to its arguments only.

    The function must be pure: draw from keys, not from torch's generators, and take every tensor it needs as an
    argument (a tensor from outside gets no gradient: where it needs one, that is an error).
    """

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _while_compiling(function, args, kwargs)
        is_kept = torch.is_grad_enabled() or inside_functorch()
        if not is_kept or forward_mode_surrounds():
            return function(*args, **kwargs)  # which keeps nothing anyway
        leaves, structure = pytree.tree_flatten((args, kwargs))
        slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        made: list[Any] = []

        def flat(*tensors: Tensor) -> tuple[Any, ...]:
            filled = list(leaves)
            for slot, tensor in zip(slots, tensors, strict=True):
                filled[slot] = tensor
            inner_args, inner_kwargs = pytree.tree_unflatten(filled, structure)
            values, out_structure = pytree.tree_flatten(function(*inner_args, **inner_kwargs))
            kept = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
            made[:] = [values, kept, out_structure]
            return tuple(values[i] for i in kept)

        tensors = _Recomputed.apply(flat, *(leaves[slot] for slot in slots))  # type: ignore[no-untyped-call]
        values, kept, out_structure = list(made[0]), made[1], made[2]
        for slot, tensor in zip(kept, tensors, strict=True):
            values[slot] = tensor
        return pytree.tree_unflatten(values, out_structure)

    return wrapped


class _Recomputed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(flat: Flat, *tensors: Tensor) -> tuple[Any, ...]:
        made = flat(*tensors) if inside_functorch() else _without_outside(flat, tensors)
        # An output that is an input (or a view of one) would be a leaf of its own graph.
        return tuple(value.clone() if any(value is one for one in tensors) else value for value in made)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.flat = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.mark_non_differentiable(*(value for value in output if not _has_gradient(value)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        slots = [i for i, tensor in enumerate(tensors) if _has_gradient(tensor)]

        def differentiable(*values: Tensor) -> tuple[Tensor, ...]:
            filled = list(tensors)
            for slot, value in zip(slots, values, strict=True):
                filled[slot] = value
            return tuple(value for value in ctx.flat(*filled) if _has_gradient(value))

        given = tuple(one for one in cotangents if one is not None and _has_gradient(one))
        inputs = [tensors[slot] for slot in slots]
        if torch.is_grad_enabled() or inside_functorch():
            found = torch.func.vjp(differentiable, *inputs)[1](given)
        else:
            found = _plain_vjp(differentiable, inputs, given)
        gradients: list[Tensor | None] = [None] * len(tensors)
        for slot, gradient in zip(slots, found, strict=True):
            gradients[slot] = gradient
        return (None, *gradients)


def _without_outside(function: Flat, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Return the function's values; raise an error if they depend on a tensor from outside that needs a gradient."""
    with torch.enable_grad():
        made = function(*(one.detach() for one in tensors))
    if any(value.requires_grad for value in made):
        raise TransformError(
            "remat of a function that uses a tensor from outside which needs a gradient",
            fix="pass it as an argument: `remat(f)(params, x)`, not `remat(lambda x: f(params, x))(x)`",
        )
    return made


def _plain_vjp(function: Flat, inputs: list[Tensor], cotangents: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Return the same product by ordinary autograd: cheaper than `torch.func`, and it takes every tensor subclass."""
    with torch.enable_grad():
        fresh = [value.detach().requires_grad_() for value in inputs]
        outputs = function(*fresh)
        live = [(out, given) for out, given in zip(outputs, cotangents, strict=True) if out.requires_grad]
        return torch.autograd.grad(
            [out for out, _ in live], fresh, [given for _, given in live], allow_unused=True, materialize_grads=False
        )


def _while_compiling(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # In a graph of its own forward and backward, torch's checkpoint marks what the partitioner must recompute. In one
    # graph of a whole step (`jit(grad(f))`) there is no such boundary, and the compiler decides what to keep.
    if not only_autograd_surrounds():
        return function(*args, **kwargs)
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _has_gradient(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
