"""Loops and branches over trees.

Eagerly they are Python's own; inside a compiled graph, branches and loops on tensors become torch's higher-order
operators. `scan` unrolls by default, which differentiates everywhere; `unroll=False` asks for torch's scan operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.functional.errors import TransformError
from piledriver.functional.torch_private import is_batched, scan_operator, while_loop_operator
from piledriver.functional.transforms.tracing import compiled_depth


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: bool = True,
) -> tuple[Any, Any]:
    """Run `carry, y = step(carry, x)` over the first dimension of `xs`' leaves; return `(carry, stacked ys)`.

    >>> scan(lambda total, x: (total + x, total + x), torch.tensor(0), torch.tensor([1, 2, 3]))
    (tensor(6), tensor([1, 3, 6]))
    """
    leaves, structure = pytree.tree_flatten(xs)
    columns = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(not column.ndim for column in columns):
        raise TransformError("scan over a number without dimensions", fix="give every leaf of xs a first dimension")
    if not columns and length is None:
        raise TransformError("scan has neither inputs nor a length", fix="pass xs= or length=")
    lengths = {len(column) for column in columns} | ({length} if length is not None else set())
    if len(lengths) != 1:
        raise TransformError(f"scan over inputs of lengths {sorted(lengths)}", fix="give every leaf the same length")
    if not unroll and columns:
        return scan_operator(step, carry, xs, reverse)
    count = lengths.pop()
    slices = [torch.unbind(column) for column in columns]
    ys: list[Any] = [None] * count
    for i in reversed(range(count)) if reverse else range(count):
        x = pytree.tree_unflatten([one[i] for one in slices], structure) if columns else None
        pair = step(carry, x)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TransformError(
                f"the step of a scan returned a {type(pair).__name__}", fix="return `(carry, y)`, with None for no y"
            )
        carry, ys[i] = pair
    return carry, pytree.tree_map(_stack, *ys) if count else None


def _stack(*parts: Any) -> Any:
    return None if parts[0] is None else torch.stack([torch.as_tensor(part) for part in parts])


def cond(predicate: bool | Tensor, if_true: Callable[..., Any], if_false: Callable[..., Any], *operands: Any) -> Any:
    """Call one of two functions on the operands; on a traced tensor it is torch's operator, and both are compiled.

    That operator has no derivative inside a graph of a whole step (`jit(grad(f))`): there, and for a batched predicate,
    both are computed, and `torch.where` picks.
    """
    if not isinstance(predicate, Tensor) or not (torch.compiler.is_compiling() or is_batched(predicate)):
        return if_true(*operands) if _as_bool(predicate) else if_false(*operands)
    if not torch.compiler.is_compiling() or compiled_depth("gradient"):
        yes, no = if_true(*operands), if_false(*operands)
        return pytree.tree_map(lambda a, b: torch.where(predicate, a, b), yes, no)
    leaves, structure = pytree.tree_flatten(operands)
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def on_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
        def flat(*tensors: Tensor) -> Any:
            filled = list(leaves)
            for slot, tensor in zip(slots, tensors, strict=True):
                filled[slot] = tensor
            return function(*pytree.tree_unflatten(filled, structure))

        return flat

    tensors = tuple(leaves[slot] for slot in slots)
    return torch.cond(predicate, on_tensors(if_true), on_tensors(if_false), tensors)


def switch(index: int | Tensor, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Call the branch of this number on the operands; numbers outside the range take the nearest branch.

    >>> [switch(i, [torch.sin, torch.cos], torch.tensor(0.0)).item() for i in (0, 1, 7)]
    [0.0, 1.0, 1.0]
    """
    if not branches:
        raise TransformError("switch without branches", fix="give one or more functions")
    if not isinstance(index, Tensor) or not (torch.compiler.is_compiling() or is_batched(index)):
        return branches[min(max(int(index), 0), len(branches) - 1)](*operands)
    if len(branches) == 1:
        return branches[0](*operands)
    return cond(index <= 0, branches[0], lambda *inner: switch(index - 1, branches[1:], *inner), *operands)


def while_loop(test: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
    """Repeat `carry = body(carry)` while `test(carry)`; in a compiled graph it is torch's operator (no gradients).

    >>> while_loop(lambda n: n < 100, lambda n: n * 2, torch.tensor(3))
    tensor(192)
    """
    if torch.compiler.is_compiling():
        leaves, structure = pytree.tree_flatten(carry)

        def flat_test(*values: Any) -> Any:
            return test(pytree.tree_unflatten(list(values), structure))

        def flat_body(*values: Any) -> Any:
            return tuple(pytree.tree_leaves(body(pytree.tree_unflatten(list(values), structure))))

        looped = while_loop_operator(flat_test, flat_body, tuple(leaves))
        return pytree.tree_unflatten(list(looped), structure)
    while bool(test(carry)):
        carry = body(carry)
    return carry


def fori_loop(start: int, stop: int, body: Callable[[int, Any], Any], carry: Any) -> Any:
    """Run `carry = body(i, carry)` for every i from start to stop; unrolled, so it differentiates."""
    for i in range(start, stop):
        carry = body(i, carry)
    return carry


def _as_bool(predicate: bool | Tensor) -> bool:
    if isinstance(predicate, Tensor) and predicate.numel() != 1:
        raise TransformError(f"cond on a tensor of shape {tuple(predicate.shape)}", fix="use `torch.where`, or `vmap`")
    return bool(predicate)
