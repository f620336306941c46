"""The second half of a gated MLP, (silu(gate) * up) @ weight.T, keeping only what enters it.

The activation is a third of what an MLP would keep for its backward pass; it is computed again there by the kernel that
reads its inputs for the gradient anyway. Operators of their own, so that a compiler does not see that it computed the
same before and keep it after all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels import gated_mlp_triton as gate_kernel


def can_fuse(gate_up: Tensor, activation: str) -> bool:
    """Whether the kernels take this."""
    return gate_up.is_cuda and activation == "silu" and gate_kernel.available()


def gated_linear(gate_up: Tensor, weight: Tensor, group: int) -> Tensor:
    """[..., 2 * width] in alternating groups of columns to [..., rows of weight].

    >>> gate_up, weight = torch.randn(3, 8), torch.randn(5, 4)
    >>> gates, ups = gate_up.unflatten(-1, (-1, 2, 2)).unbind(-2)
    >>> expected = (F.silu(gates) * ups).flatten(-2) @ weight.T
    >>> torch.allclose(gated_linear(gate_up, weight, 2), expected, atol=1e-5)
    True
    """
    out: Tensor = _GatedLinear.apply(gate_up.flatten(0, -2), weight, group)  # type: ignore[no-untyped-call]
    return torch.unflatten(out, 0, gate_up.shape[:-1])


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(gate_up: Tensor, weight: Tensor, group: int) -> Tensor:
        return F.linear(_gate(gate_up, group), weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        gate_up, weight, ctx.group = inputs
        ctx.save_for_backward(gate_up, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, weight = ctx.saved_tensors
        by_gate_up, value = _gate_backward(gate_up, (gradient @ weight).contiguous(), ctx.group)
        if not ctx.needs_input_grad[1]:
            return by_gate_up, None, None
        # In the weight's own order in memory: an optimizer reads both side by side.
        by_weight = gradient.t() @ value if weight.is_contiguous() else (value.t() @ gradient).t()
        return by_gate_up, by_weight, None


def _halves(gate_up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    gates, ups = torch.unflatten(gate_up.float(), -1, (-1, 2, group)).unbind(-2)
    return gates, ups


@torch.library.custom_op("piledriver::gate", mutates_args=())
def _gate(gate_up: Tensor, group: int) -> Tensor:
    if can_fuse(gate_up, "silu"):
        return gate_kernel.forward(gate_up.contiguous(), group)
    gates, ups = _halves(gate_up, group)
    return (F.silu(gates) * ups).flatten(-2).to(gate_up.dtype)


@_gate.register_fake
def _(gate_up: Tensor, group: int) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.custom_op("piledriver::gate_backward", mutates_args=())
def _gate_backward(gate_up: Tensor, gradient: Tensor, group: int) -> tuple[Tensor, Tensor]:
    if can_fuse(gate_up, "silu"):
        return gate_kernel.backward(gate_up.contiguous(), gradient, group)
    gates, ups = _halves(gate_up, group)
    slope = torch.unflatten(gradient.float(), -1, (-1, group))
    sigmoid = gates.sigmoid()
    swish = gates * sigmoid
    by_gate_up = torch.stack((slope * ups * (sigmoid + swish * (1.0 - sigmoid)), slope * swish), dim=-2).flatten(1)
    return by_gate_up.to(gate_up.dtype), (swish * ups).flatten(-2).to(gradient.dtype)


@_gate_backward.register_fake
def _(gate_up: Tensor, gradient: Tensor, group: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up), torch.empty_like(gradient)
