"""Loops and branches over trees.

Eagerly they are Python's own; inside a compiled graph, branches and loops on tensors become torch's higher-order
operators. `scan` unrolls by default, which differentiates everywhere; `unroll=False` asks for torch's scan operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from piledriver.functional.errors import TransformError


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any = None,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: bool = True,
) -> tuple[Any, Any]:
    """`carry, y = step(carry, x)` over the first dimension of every leaf of `xs`; returns `(carry, stacked ys)`.

    >>> scan(lambda total, x: (total + x, total + x), torch.tensor(0), torch.tensor([1, 2, 3]))
    (tensor(6), tensor([1, 3, 6]))
    """
    leaves, structure = pytree.tree_flatten(xs)
    columns = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not columns and length is None:
        raise TransformError("scan has neither inputs nor a length", fix="pass xs= or length=")
    lengths = {len(column) for column in columns} | ({length} if length is not None else set())
    if len(lengths) != 1:
        raise TransformError(f"scan over inputs of lengths {sorted(lengths)}", fix="give every leaf the same length")
    if not unroll and columns:
        return _operator_scan(step, carry, xs, reverse)
    count = lengths.pop()
    slices = [torch.unbind(column) for column in columns]
    ys: list[Any] = [None] * count
    for i in reversed(range(count)) if reverse else range(count):
        x = pytree.tree_unflatten([one[i] for one in slices], structure) if columns else None
        carry, ys[i] = step(carry, x)
    return carry, pytree.tree_map(lambda *parts: torch.stack(parts), *ys) if count else None


def cond(predicate: bool | Tensor, if_true: Callable[..., Any], if_false: Callable[..., Any], *operands: Any) -> Any:
    """One of two functions of the operands; on a traced tensor it is torch's operator, and both are compiled."""
    if isinstance(predicate, Tensor) and (torch.compiler.is_compiling() or _is_traced(predicate)):
        return torch.cond(predicate, if_true, if_false, operands)
    return if_true(*operands) if bool(predicate) else if_false(*operands)


def while_loop(test: Callable[[Any], Any], body: Callable[[Any], Any], carry: Any) -> Any:
    """Repeat `carry = body(carry)` while `test(carry)`; in a compiled graph it is torch's operator (no gradients).

    >>> while_loop(lambda n: n < 100, lambda n: n * 2, torch.tensor(3))
    tensor(192)
    """
    if torch.compiler.is_compiling():
        from torch._higher_order_ops import while_loop as operator

        leaves, structure = pytree.tree_flatten(carry)

        def flat_test(*values: Any) -> Any:
            return test(pytree.tree_unflatten(list(values), structure))

        def flat_body(*values: Any) -> Any:
            return tuple(pytree.tree_leaves(body(pytree.tree_unflatten(list(values), structure))))

        looped = operator(flat_test, flat_body, tuple(leaves))  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(list(looped), structure)
    while bool(test(carry)):
        carry = body(carry)
    return carry


def fori_loop(start: int, stop: int, body: Callable[[int, Any], Any], carry: Any) -> Any:
    """`carry = body(i, carry)` for every i from start to stop; unrolled, so it differentiates."""
    for i in range(start, stop):
        carry = body(i, carry)
    return carry


def _operator_scan(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, reverse: bool) -> tuple[Any, Any]:
    from torch._higher_order_ops.scan import scan as operator

    return operator(step, carry, xs, reverse=reverse)


def _is_traced(value: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(value)
