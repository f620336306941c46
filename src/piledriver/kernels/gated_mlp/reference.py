"""activation(gate) * up and its gradient in plain torch; gate and up alternate in groups of columns."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.registry import Kernel

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
"""The activations that every kernel of this operation computes."""


class ReferenceGate(Kernel):
    """The formula in fp32, returned in the input's dtype."""

    def forward(self, gate_up: Tensor, group: int, activation: str = "silu") -> Tensor:
        """Return activation(gate) * up: [rows, 2 * width] to [rows, width]."""
        gates, ups = split_gate_up(gate_up, group)
        if activation == "silu":
            value = F.silu(gates)
        else:
            value = F.gelu(gates, approximate="tanh" if activation == "gelu_tanh" else "none")
        return (value * ups).flatten(-2).to(gate_up.dtype)

    def backward(
        self, gate_up: Tensor, gradient: Tensor, group: int, activation: str = "silu"
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient with respect to `gate_up`, and what `forward` returned."""
        by_gate_up, value = gate_gradients(gate_up, gradient, group, activation)
        return by_gate_up.to(gate_up.dtype), value.to(gradient.dtype)


def split_gate_up(gate_up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the columns of gate and of up in fp32, each [..., groups, group]."""
    gates, ups = torch.unflatten(gate_up.float(), -1, (-1, 2, group)).unbind(-2)
    return gates, ups


def gate_gradients(gate_up: Tensor, gradient: Tensor, group: int, activation: str = "silu") -> tuple[Tensor, Tensor]:
    """Return the gradient with respect to `gate_up`, and the activation, in fp32."""
    gates, ups = split_gate_up(gate_up, group)
    by_value = torch.unflatten(gradient.float(), -1, (-1, group))
    value, slope = _value_and_slope(gates, activation)
    by_gate, by_up = by_value * ups * slope, by_value * value
    return torch.stack((by_gate, by_up), dim=-2).flatten(1), (value * ups).flatten(-2)


def _value_and_slope(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return an activation and its derivative."""
    if activation == "silu":
        sigmoid = x.sigmoid()
        swish = x * sigmoid
        return swish, sigmoid + swish * (1.0 - sigmoid)
    if activation == "gelu_tanh":
        factor = math.sqrt(2.0 / math.pi)
        tanh = torch.tanh(factor * (x + 0.044715 * x * x * x))
        inner = factor * (1.0 + 3.0 * 0.044715 * x * x)
        return 0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
    normal = 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))
    return x * normal, normal + x * torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
