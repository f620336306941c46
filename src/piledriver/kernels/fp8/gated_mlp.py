"""A gated MLP in fp8 as one operator with its gradient: the activation is computed inside the casts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from piledriver.kernels.fp8.reference import BACKWARD, FORWARD, needs_gradient, pad_rows, padded_size
from piledriver.kernels.registry import fastest_kernel


def fp8_gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, group: int) -> Tensor:
    """Return (silu(gate) * up) @ down.T with gate and up from x @ gate_up.T, one scale per tensor.

    Rows of gate and up alternate in groups of `group` in `gate_up`.
    """
    y = _gated_mlp(x.flatten(0, -2), gate_up, down, group, needs_gradient(x, gate_up, down))[0]
    return torch.unflatten(y, 0, x.shape[:-1])


@torch.library.custom_op("piledriver::fp8_gated_mlp", mutates_args=())
def _gated_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, group: int, training: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the output; the input of the activation; x and the weights transposed; their scales and its own."""
    fp8 = fastest_kernel("fp8", x.device)
    x8, x_columns, x_scale = fp8.cast(pad_rows(x), FORWARD, columns=training)
    gu8, gu_columns, gu_scale = fp8.cast(gate_up, FORWARD, columns=training)
    hidden = fp8.product(x8, gu8, x_scale, gu_scale, x.dtype, fast=True)
    value, value_scale = fp8.gate(hidden, group)
    down8, down_columns, down_scale = fp8.cast(down, FORWARD, columns=training)
    y = fp8.product(value, down8, value_scale, down_scale, x.dtype, fast=True)
    if not training:
        hidden = hidden.new_empty(0)
    scales = (x_scale, gu_scale, down_scale, value_scale)
    return (y[: x.shape[0]], hidden, x_columns, gu_columns, down_columns, *scales)


@_gated_mlp.register_fake
def _(
    x: Tensor, gate_up: Tensor, down: Tensor, group: int, training: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    height = padded_size(x.shape[0])
    scale = functools.partial(x.new_empty, 1, dtype=torch.float32)
    return (
        x.new_empty(x.shape[0], down.shape[0]),
        x.new_empty((height, gate_up.shape[0]) if training else (0,)),
        x.new_empty((x.shape[1], height) if training else (0,), dtype=FORWARD),
        x.new_empty((gate_up.shape[1], gate_up.shape[0]) if training else (0,), dtype=FORWARD),
        x.new_empty((down.shape[1], down.shape[0]) if training else (0,), dtype=FORWARD),
        *(scale(), scale(), scale(), scale()),
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
    fp8 = fastest_kernel("fp8", gradient.device)
    g8, g_columns, g_scale = fp8.cast(pad_rows(gradient), BACKWARD)
    d_value = fp8.product(g8, down, g_scale, down_scale, gradient.dtype)
    h8, h_columns, h_scale, value = fp8.gate_backward(hidden, d_value, value_scale, group)
    del d_value
    d_down = fp8.product(g_columns, value, g_scale, value_scale, down_dtype)
    d_gate_up = fp8.product(h_columns, x, h_scale, x_scale, gate_up_dtype)
    d_x = fp8.product(h8, gate_up, h_scale, gu_scale, gradient.dtype)
    return d_x[: gradient.shape[0]], d_gate_up, d_down


@_gated_mlp_backward.register_fake
def _(
    gradient: Tensor, hidden: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    gate_up_dtype, down_dtype = settings[-2:]
    return (
        gradient.new_empty(gradient.shape[0], x.shape[0]),
        gradient.new_empty(gate_up.shape[1], gate_up.shape[0], dtype=gate_up_dtype),
        gradient.new_empty(down.shape[1], down.shape[0], dtype=down_dtype),
    )


def _save_mlp(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, gate_up, down, ctx.group, _ = inputs
    ctx.dtypes = gate_up.dtype, down.dtype
    ctx.save_for_backward(*output[1:])


def _mlp_gradients(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    found = _gated_mlp_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.group, *ctx.dtypes)
    wanted = ctx.needs_input_grad[:3]
    return (*(each if want else None for each, want in zip(found, wanted, strict=True)), None, None)


_gated_mlp.register_autograd(_mlp_gradients, setup_context=_save_mlp)


@register_flop_formula(torch.ops.piledriver.fp8_gated_mlp)
def _(x: Any, gate_up: Any, down: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * x[0] * (gate_up[0] * gate_up[1] + down[0] * down[1]))


@register_flop_formula(torch.ops.piledriver.fp8_gated_mlp_backward)
def _(gradient: Any, hidden: Any, x: Any, gate_up: Any, down: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(4 * gradient[0] * (gate_up[0] * gate_up[1] + down[0] * down[1]))
