"""The two fp8 layers as operators with their gradients: a linear layer, and a whole gated MLP.

Operators, so that a compiled model calls them as they stand and an activation policy can name them. What the backward
needs is cast once, in the forward, and kept in 8 bits: half of what a 16-bit layer keeps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from piledriver.kernels.fp8.matmul import BACKWARD, FORWARD, MULTIPLE, cast, cast_rows, gate, gate_backward, product


def fp8_linear(x: Tensor, weight: Tensor, *, rowwise: bool = False) -> Tensor:
    """x @ weight.T in fp8, in the dtype of x; one scale per tensor, or one per row.

    With a scale per row the weight's gradient is computed from 16 bits: it sums over the rows, each of which would have
    another scale.
    """
    rows = x.flatten(0, -2)
    y = _linear(rows, weight, rowwise, _needs_gradient(x, weight))[0]
    return torch.unflatten(y, 0, x.shape[:-1])


def fp8_gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, group: int) -> Tensor:
    """(silu(gate) * up) @ down.T with gate and up from x @ gate_up.T, one scale per tensor."""
    rows = x.flatten(0, -2)
    y = _gated_mlp(rows, gate_up, down, group, _needs_gradient(x, gate_up, down))[0]
    return torch.unflatten(y, 0, x.shape[:-1])


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _even(rows: Tensor) -> Tensor:
    """With rows of zeros added where the matrix units ask for it: they change no sum."""
    missing = -rows.shape[0] % MULTIPLE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


@torch.library.custom_op("piledriver::fp8_linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, rowwise: bool, training: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The product; x and weight turned over for the backward, and their scales."""
    even = _even(x)
    if rowwise:
        x8, x_scale = cast_rows(even, FORWARD)
        w8, w_scale = cast_rows(weight, FORWARD)
        kept = [x.new_empty(0, dtype=FORWARD) for _ in range(2)]
        y = product(x8, w8, x_scale, w_scale, x.dtype, fast=True)
        return (
            y[: x.shape[0]],
            kept[0],
            kept[1],
            x.new_empty(1, dtype=torch.float32),
            x.new_empty(1, dtype=torch.float32),
        )
    x8, x8_columns, x_scale = cast(even, FORWARD, columns=training)
    w8, w8_columns, w_scale = cast(weight, FORWARD, columns=training)
    y = product(x8, w8, x_scale, w_scale, x.dtype, fast=True)
    return y[: x.shape[0]], x8_columns, w8_columns, x_scale, w_scale


@_linear.register_fake
def _(x: Tensor, weight: Tensor, rowwise: bool, training: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    keep = training and not rowwise
    height = (x.shape[0] + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    return (
        x.new_empty(x.shape[0], weight.shape[0]),
        x.new_empty((x.shape[1], height) if keep else (0,), dtype=FORWARD),
        x.new_empty((weight.shape[1], weight.shape[0]) if keep else (0,), dtype=FORWARD),
        x.new_empty(0 if rowwise else 1, dtype=torch.float32),
        x.new_empty(0 if rowwise else 1, dtype=torch.float32),
    )


@torch.library.custom_op("piledriver::fp8_linear_backward", mutates_args=())
def _linear_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    w_dtype: torch.dtype,
    rowwise: bool,
    by_x: bool,
    by_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Tensorwise x and weight are those that `_linear` turned over; rowwise they are its inputs."""
    even = _even(gradient)
    d_x, d_weight = gradient.new_empty(0), gradient.new_empty(0, dtype=w_dtype)
    if rowwise:
        if by_x:
            g8, g_scale = cast_rows(even, BACKWARD)
            w8, scale = cast_rows(weight.t().contiguous(), FORWARD)
            d_x = product(g8, w8, g_scale, scale, gradient.dtype)[: gradient.shape[0]]
        if by_weight:
            d_weight = torch.mm(gradient.t(), x).to(w_dtype)
        return d_x, d_weight
    g8, g8_columns, g_scale = cast(even, BACKWARD, columns=by_weight)
    if by_x:
        d_x = product(g8, weight, g_scale, w_scale, gradient.dtype)[: gradient.shape[0]]
    if by_weight:
        d_weight = product(g8_columns, x, g_scale, x_scale, w_dtype)
    return d_x, d_weight


@_linear_backward.register_fake
def _(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    w_dtype: torch.dtype,
    rowwise: bool,
    by_x: bool,
    by_weight: bool,
) -> tuple[Tensor, Tensor]:
    inner = x.shape[1] if rowwise else x.shape[0]
    return (
        gradient.new_empty((gradient.shape[0], inner) if by_x else (0,)),
        gradient.new_empty((gradient.shape[1], inner) if by_weight else (0,), dtype=w_dtype),
    )


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, ctx.rowwise, _ = inputs
    ctx.w_dtype = weight.dtype
    _, x_columns, w_columns, x_scale, w_scale = output
    kept = (x, weight) if ctx.rowwise else (x_columns, w_columns)
    ctx.save_for_backward(*kept, x_scale, w_scale)


def _linear_gradients(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    by_x, by_weight = ctx.needs_input_grad[:2]
    d_x, d_weight = _linear_backward(
        gradient.contiguous(), *ctx.saved_tensors, ctx.w_dtype, ctx.rowwise, by_x, by_weight
    )
    return d_x if by_x else None, d_weight if by_weight else None, None, None


_linear.register_autograd(_linear_gradients, setup_context=_keep_linear)


@torch.library.custom_op("piledriver::fp8_gated_mlp", mutates_args=())
def _gated_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, group: int, training: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output; what the activation reads; x and both weights turned over; scales of x, these, the activation."""
    x8, x_columns, x_scale = cast(_even(x), FORWARD, columns=training)
    gu8, gu_columns, gu_scale = cast(gate_up, FORWARD, columns=training)
    hidden = product(x8, gu8, x_scale, gu_scale, x.dtype, fast=True)
    value, value_scale = gate(hidden, group)
    down8, down_columns, down_scale = cast(down, FORWARD, columns=training)
    y = product(value, down8, value_scale, down_scale, x.dtype, fast=True)
    if not training:
        hidden = hidden.new_empty(0)
    scales = (x_scale, gu_scale, down_scale, value_scale)
    return (y[: x.shape[0]], hidden, x_columns, gu_columns, down_columns, *scales)


@_gated_mlp.register_fake
def _(
    x: Tensor, gate_up: Tensor, down: Tensor, group: int, training: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    height = (x.shape[0] + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    return (
        x.new_empty(x.shape[0], down.shape[0]),
        x.new_empty((height, gate_up.shape[0]) if training else (0,)),
        x.new_empty((x.shape[1], height) if training else (0,), dtype=FORWARD),
        x.new_empty((gate_up.shape[1], gate_up.shape[0]) if training else (0,), dtype=FORWARD),
        x.new_empty((down.shape[1], down.shape[0]) if training else (0,), dtype=FORWARD),
        x.new_empty(1, dtype=torch.float32),
        x.new_empty(1, dtype=torch.float32),
        x.new_empty(1, dtype=torch.float32),
        x.new_empty(1, dtype=torch.float32),
    )


@torch.library.custom_op("piledriver::fp8_gated_mlp_backward", mutates_args=())
def _gated_mlp_backward(
    gradient: Tensor,
    hidden: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    x_scale: Tensor,
    gu_scale: Tensor,
    down_scale: Tensor,
    value_scale: Tensor,
    group: int,
    gate_up_dtype: torch.dtype,
    down_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    g8, g_columns, g_scale = cast(_even(gradient), BACKWARD)
    d_value = product(g8, down, g_scale, down_scale, gradient.dtype)
    h8, h_columns, h_scale, value = gate_backward(hidden, d_value, value_scale, group)
    del d_value
    d_down = product(g_columns, value, g_scale, value_scale, down_dtype)
    d_gate_up = product(h_columns, x, h_scale, x_scale, gate_up_dtype)
    d_x = product(h8, gate_up, h_scale, gu_scale, gradient.dtype)
    return d_x[: gradient.shape[0]], d_gate_up, d_down


@_gated_mlp_backward.register_fake
def _(
    gradient: Tensor,
    hidden: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    x_scale: Tensor,
    gu_scale: Tensor,
    down_scale: Tensor,
    value_scale: Tensor,
    group: int,
    gate_up_dtype: torch.dtype,
    down_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        gradient.new_empty(gradient.shape[0], x.shape[0]),
        gradient.new_empty(gate_up.shape[1], gate_up.shape[0], dtype=gate_up_dtype),
        gradient.new_empty(down.shape[1], down.shape[0], dtype=down_dtype),
    )


def _keep_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, gate_up, down, ctx.group, _ = inputs
    ctx.dtypes = gate_up.dtype, down.dtype
    ctx.save_for_backward(*output[1:])


def _mlp_gradients(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = _gated_mlp_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.group, *ctx.dtypes)
    wanted = ctx.needs_input_grad[:3]
    return (*(each if want else None for each, want in zip(found, wanted, strict=True)), None, None)


_gated_mlp.register_autograd(_mlp_gradients, setup_context=_keep_mlp)


@register_flop_formula(torch.ops.piledriver.fp8_linear)
def _(x: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * x[0] * weight[0] * weight[1])


@register_flop_formula(torch.ops.piledriver.fp8_linear_backward)
def _(gradient: Any, x: Any, *settings: Any, out_shape: Any = None, **_: Any) -> int:
    rowwise, by_x, by_weight = settings[-3:]
    inner = x[1] if rowwise else x[0]
    return int(2 * gradient[0] * gradient[1] * inner * (bool(by_x) + bool(by_weight)))


@register_flop_formula(torch.ops.piledriver.fp8_gated_mlp)
def _(x: Any, gate_up: Any, down: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * x[0] * (gate_up[0] * gate_up[1] + down[0] * down[1]))


@register_flop_formula(torch.ops.piledriver.fp8_gated_mlp_backward)
def _(gradient: Any, hidden: Any, x: Any, gate_up: Any, down: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(4 * gradient[0] * (gate_up[0] * gate_up[1] + down[0] * down[1]))
