"""MLP of a block: gated, activation(gate) * up, or plain, activation(up).

Gate and up are one fused projection. Its rows alternate in blocks (gate, up, gate, up, ... of size
`config.gate_block_of`), so that an even split of the rows over ranks gives each rank matching parts of both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from piledriver.kernels.gated_mlp import can_fuse, gated_linear
from piledriver.models.config import ModelConfig, gate_block_of
from piledriver.models.layers import XIELU, Linear, activate
from piledriver.models.torch_private import has_forward_hooks
from piledriver.runtime.dtensor import is_dtensor


def gate(x: Tensor, activation: str, block: int, limit: float | None = None) -> Tensor:
    """Return activation(gate) * up of [..., 2 * mlp_dim] in alternating blocks.

    With a `limit` (gpt-oss), gates are clamped from above and ups on both sides, and one is added to the ups.
    """
    gates, ups = torch.unflatten(x, -1, (-1, 2, block)).unbind(-2)
    if limit is not None:
        gates, ups = gates.clamp(max=limit), ups.clamp(-limit, limit) + 1
    return (activate(activation, gates) * ups).flatten(-2)


class GatedMLP(nn.Module):
    """down(activation(gate) * up) (Shazeer, GLU variants improve transformer, 2020)."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        width = width or config.mlp_dim
        self.activation, self.block, self.limit = config.activation, gate_block_of(width), config.gate_limit
        self.fuse = True
        self.gate_up = Linear(config.dim, 2 * width, bias=config.mlp_bias)
        self.down = Linear(width, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to [..., dim]."""
        gate_up = self.gate_up(x)
        if self._can_fuse(gate_up):
            return gated_linear(gate_up, self.down.weight.to(gate_up.dtype), self.block, self.activation)
        out: Tensor = self.down(gate(gate_up, self.activation, self.block, self.limit))
        return out

    def _can_fuse(self, gate_up: Tensor) -> bool:
        """Return whether `down` is a plain matrix product: no bias, no DTensor, no forward hooks."""
        down = self.down
        plain = self.fuse and self.limit is None and down.bias is None and not has_forward_hooks(down)
        return plain and not is_dtensor(down.weight) and can_fuse(gate_up, self.activation)


class PlainMLP(nn.Module):
    """down(activation(up))."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        super().__init__()
        width = width or config.mlp_dim
        self.activation = config.activation
        self.xielu = XIELU() if config.activation == "xielu" else None
        self.up = Linear(config.dim, width, bias=config.mlp_bias)
        self.down = Linear(width, config.dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP to [..., dim]."""
        hidden = self.up(x)
        out: Tensor = self.down(activate(self.activation, hidden) if self.xielu is None else self.xielu(hidden))
        return out


def make_mlp(config: ModelConfig, width: int | None = None) -> GatedMLP | PlainMLP:
    """Return the MLP that the config asks for, of `width` (default: mlp_dim)."""
    return GatedMLP(config, width) if config.mlp == "gated" else PlainMLP(config, width)
