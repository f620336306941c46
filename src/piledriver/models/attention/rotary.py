"""Rotary position embedding: rotate pairs of dimensions by an angle proportional to the position (Su et al., 2021).

Dimension i is paired with i + half, as in Hugging Face checkpoints. The table of cosines and sines is a pure function
of the config, always fp32: it is rebuilt whenever the module moves, so that `.to(bfloat16)` and meta-device
construction keep it exact, and a compiled forward reads it instead of recomputing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from piledriver.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Return the radians per position of each pair of dimensions, with the scaling of the config."""
    dim = config.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _scale(frequencies, config.rope_scaling)


def _scale(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # within the original length
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def rotary_table(config: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Return [max_positions, rotary_dim]: the cosines of each position's angles, then the sines."""
    positions = torch.arange(config.max_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, inverse_frequencies(config, device))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def apply_rotary(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the leading dimensions of each head of [batch, time, heads, head_dim], in fp32.

    `table` is [batch or 1, time, rotary_dim].
    """
    for _ in range(x.dim() - table.dim()):
        table = table.unsqueeze(2)
    half = table.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], dim=-1)
    first, second = first.float(), second.float()
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)


class Rotary(nn.Module):
    """Module that holds the table; `forward` selects the rows of a batch's positions."""

    table: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("table", rotary_table(config), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.table = rotary_table(self.config, self.table.device)
        return self

    def forward(self, length: int, positions: Tensor | None) -> Tensor:
        """Return [1, length, rotary_dim] from position 0, or [batch, length, rotary_dim] of the given positions."""
        return self.table[:length].unsqueeze(0) if positions is None else self.table[positions]
