"""MLP of a block: gated, activation(gate) * up, or plain, activation(up).

Gate and up are one fused projection. Its rows alternate in blocks of `gate_block` (gate, up, gate, up, ...), so that an
even split of the rows over ranks gives each rank matching parts of both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.kernels.gated_mlp import can_fuse, gated_linear
from piledriver.models.config import ModelConfig
from piledriver.models.layers import Linear, activate
from piledriver.models.torch_private import has_forward_hooks


def gate(x: Tensor, activation: str, block: int) -> Tensor:
    """Return activation(gate) * up of [..., 2 * mlp_dim] in alternating blocks."""
    gates, ups = torch.unflatten(x, -1, (-1, 2, block)).unbind(-2)
    return (activate(activation, gates) * ups).flatten(-2)


class GatedMLP(nn.Module):
    """down(activation(gate) * up) (Shazeer, GLU variants improve transformer, 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation, self.block = config.activation, config.gate_block
        self.fuse = True
        self.gate_up = Linear(config.dim, 2 * config.mlp_dim, bias=config.mlp_bias)
        self.down = Linear(config.mlp_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to [..., dim]."""
        gate_up = self.gate_up(x)
        if self._can_fuse(gate_up):
            return gated_linear(gate_up, self.down.weight.to(gate_up.dtype), self.block)
        out: Tensor = self.down(gate(gate_up, self.activation, self.block))
        return out

    def _can_fuse(self, gate_up: Tensor) -> bool:
        """Return whether `down` is a plain matrix product: no bias, no DTensor, no forward hooks."""
        down = self.down
        plain = self.fuse and down.bias is None and not has_forward_hooks(down)
        return plain and not isinstance(down.weight, DTensor) and can_fuse(gate_up, self.activation)


class PlainMLP(nn.Module):
    """down(activation(up))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.up = Linear(config.dim, config.mlp_dim, bias=config.mlp_bias)
        self.down = Linear(config.mlp_dim, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to [..., dim]."""
        out: Tensor = self.down(activate(self.activation, self.up(x)))
        return out
