"""Rotary position embedding: rotate pairs of dimensions by an angle proportional to the position (Su et al., 2021).

Dimension i is paired with i + half, as in most Hugging Face checkpoints; the interchange permutes the rows of those
that pair neighbours. The table of cosines and sines is a pure function of the config, always fp32: it is rebuilt
whenever the module moves, so that `.to(bfloat16)` and meta-device construction keep it exact, and a compiled forward
reads it instead of recomputing it. Frequencies that change with the length of a sequence (LongRoPE, dynamic NTK) depend
on each row's last position only, so that the rows of a batch do not affect each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from piledriver.models.config import ModelConfig, RopeScaling


def inverse_frequencies(
    config: ModelConfig,
    device: torch.device | None = None,
    *,
    kind: Literal["full", "sliding"] = "full",
    long: bool = False,
) -> Tensor:
    """Return the radians per position of each pair of dimensions, with the scaling of the config.

    `long` gives those of sequences beyond the original length, where LongRoPE has two sets.
    """
    if kind == "sliding":
        assert config.sliding_rope_theta is not None
        return _frequencies(config.rotary_dim, config.sliding_rope_theta, device)
    frequencies, scaling = _frequencies(config.rotary_dim, config.rope_theta, device), config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        factors = torch.tensor(scaling.long_factors if long else scaling.short_factors, device=device)
        return frequencies / factors
    kept = _kept_by_llama3(frequencies, scaling) if scaling.kind == "llama3" else _kept_by_yarn(config, device)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _frequencies(dim: int, theta: float | Tensor, device: torch.device | None) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return 1.0 / (theta**exponents)


def _kept_by_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return how much of each frequency is left alone: 1 for all of it."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # within the original length
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _kept_by_yarn(config: ModelConfig, device: torch.device | None) -> Tensor:
    scaling, dim = config.rope_scaling, config.rotary_dim
    assert scaling is not None

    def pair_with(turns: float) -> float:
        """Return the (fractional) pair of dimensions that turns so often within the original length."""
        length = scaling.original_max_positions / (turns * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(config.rope_theta))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32, device=device)
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)


def rotary_table(
    config: ModelConfig,
    device: torch.device | None = None,
    *,
    kind: Literal["full", "sliding"] = "full",
    long: bool = False,
) -> Tensor:
    """Return [max_positions, rotary_dim]: the cosines of each position's angles, then the sines."""
    if torch.empty(0, device=device).is_meta:  # operations on this device import torch's whole compiler
        return torch.empty(config.max_positions, config.rotary_dim, dtype=torch.float32, device=device)
    positions = torch.arange(config.max_positions, dtype=torch.float32, device=device)
    table = _cos_sin(torch.outer(positions, inverse_frequencies(config, device, kind=kind, long=long)))
    scaling = config.rope_scaling
    return table if scaling is None or kind == "sliding" else table * scaling.magnitude


def _cos_sin(angles: Tensor) -> Tensor:
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
    long_table: Tensor | None

    def __init__(self, config: ModelConfig, kind: Literal["full", "sliding"] = "full") -> None:
        super().__init__()
        self.config, self.kind = config, kind
        self.scaling = None if kind == "sliding" else config.rope_scaling
        self.register_buffer("table", rotary_table(config, kind=kind), persistent=False)
        has_two = self.scaling is not None and self.scaling.kind == "longrope"
        long_table = rotary_table(config, kind=kind, long=True) if has_two else None
        self.register_buffer("long_table", long_table, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.table.device
        self.table = rotary_table(self.config, device, kind=self.kind)
        if self.long_table is not None:
            self.long_table = rotary_table(self.config, device, kind=self.kind, long=True)
        return self

    def forward(self, length: int, positions: Tensor | None) -> Tensor:
        """Return [1, length, rotary_dim] from position 0, or [batch, length, rotary_dim] of the given positions."""
        if self.scaling is not None and self.scaling.depends_on_length:
            return self._by_length(self.scaling, length, positions)
        return self.table[:length].unsqueeze(0) if positions is None else self.table[positions]

    def _by_length(self, scaling: RopeScaling, length: int, positions: Tensor | None) -> Tensor:
        original = scaling.original_max_positions
        if positions is None and length <= original:
            return self.table[:length].unsqueeze(0)
        if positions is None:
            positions = torch.arange(length, device=self.table.device).unsqueeze(0)
        lengths = positions.amax(dim=-1, keepdim=True) + 1
        if self.long_table is not None:
            return torch.where((lengths > original).unsqueeze(-1), self.long_table[positions], self.table[positions])
        growth = scaling.factor * lengths.clamp(min=original) / original - (scaling.factor - 1)
        dim = self.config.rotary_dim
        frequencies = _frequencies(dim, self.config.rope_theta * growth ** (dim / (dim - 2)), self.table.device)
        return _cos_sin(positions.unsqueeze(-1).float() * frequencies.unsqueeze(-2))
