"""(activation(gate) * up) @ weight.T as an autograd function that keeps only its inputs.

The activation is a third of what an MLP would keep for its backward pass; the kernel that reads its inputs for the
gradient computes it again. Forward and backward are custom operators: a compiler that saw inside would recognise the
activation as computed before, and keep it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.gated_mlp.reference import ACTIVATIONS
from piledriver.kernels.registry import HAS_TRITON, fastest_kernel


def can_fuse(gate_up: Tensor, activation: str) -> bool:
    """Return whether a fused kernel exists for this tensor's device and this activation."""
    return HAS_TRITON and gate_up.is_cuda and activation in ACTIVATIONS


def gated_linear(gate_up: Tensor, weight: Tensor, group: int, activation: str = "silu") -> Tensor:
    """Return (activation(gate) * up) @ weight.T of [..., 2 * width], in which groups of gate and up columns alternate.

    >>> gate_up, weight = torch.randn(3, 8), torch.randn(5, 4)
    >>> gates, ups = gate_up.unflatten(-1, (-1, 2, 2)).unbind(-2)
    >>> expected = (F.silu(gates) * ups).flatten(-2) @ weight.T
    >>> torch.allclose(gated_linear(gate_up, weight, 2), expected, atol=1e-5)
    True
    """
    out: Tensor = _GatedLinear.apply(gate_up.flatten(0, -2), weight, group, activation)  # type: ignore[no-untyped-call]
    return torch.unflatten(out, 0, gate_up.shape[:-1])


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(gate_up: Tensor, weight: Tensor, group: int, activation: str) -> Tensor:
        return F.linear(_gate(gate_up, group, activation), weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gate_up, weight, ctx.group, ctx.activation = inputs
        ctx.save_for_backward(gate_up, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        by_gate_up, value = _gate_backward(gate_up, (gradient @ weight).contiguous(), ctx.group, ctx.activation)
        if not ctx.needs_input_grad[1]:
            return by_gate_up, None, None, None
        # In the weight's memory order: the optimizer reads both side by side.
        by_weight = gradient.t() @ value if weight.is_contiguous() else (value.t() @ gradient).t()
        return by_gate_up, by_weight, None, None


@torch.library.custom_op("piledriver::gate", mutates_args=())
def _gate(gate_up: Tensor, group: int, activation: str) -> Tensor:
    value: Tensor = fastest_kernel("gated_mlp", gate_up.device).forward(gate_up.contiguous(), group, activation)
    return value


@_gate.register_fake
def _(gate_up: Tensor, group: int, activation: str) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.custom_op("piledriver::gate_backward", mutates_args=())
def _gate_backward(gate_up: Tensor, gradient: Tensor, group: int, activation: str) -> tuple[Tensor, Tensor]:
    kernel = fastest_kernel("gated_mlp", gate_up.device)
    by_gate_up, value = kernel.backward(gate_up.contiguous(), gradient, group, activation)
    return by_gate_up, value


@_gate_backward.register_fake
def _(gate_up: Tensor, gradient: Tensor, group: int, activation: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up), torch.empty_like(gradient)
