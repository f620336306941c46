"""silu(gate) * up and its gradient in plain torch; gate and up alternate in groups of columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.registry import Kernel


class ReferenceGate(Kernel):
    """The formula in fp32, returned in the input's dtype."""

    def forward(self, gate_up: Tensor, group: int) -> Tensor:
        """Return silu(gate) * up: [rows, 2 * width] to [rows, width]."""
        gates, ups = split_gate_up(gate_up, group)
        return (F.silu(gates) * ups).flatten(-2).to(gate_up.dtype)

    def backward(self, gate_up: Tensor, gradient: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Return the gradient with respect to `gate_up`, and what `forward` returned."""
        by_gate_up, value = gate_gradients(gate_up, gradient, group)
        return by_gate_up.to(gate_up.dtype), value.to(gradient.dtype)


def split_gate_up(gate_up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the columns of gate and of up in fp32, each [..., groups, group]."""
    gates, ups = torch.unflatten(gate_up.float(), -1, (-1, 2, group)).unbind(-2)
    return gates, ups


def gate_gradients(gate_up: Tensor, gradient: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the gradient with respect to `gate_up`, and the activation, in fp32."""
    gates, ups = split_gate_up(gate_up, group)
    by_value = torch.unflatten(gradient.float(), -1, (-1, group))
    sigmoid = gates.sigmoid()
    swish = gates * sigmoid
    by_gate, by_up = by_value * ups * (sigmoid + swish * (1.0 - sigmoid)), by_value * swish
    return torch.stack((by_gate, by_up), dim=-2).flatten(1), (swish * ups).flatten(-2)
