"""8-bit quantisation of optimizer states: one scale per block, geometric levels, stochastic rounding.

A second moment spans many orders of magnitude within a block; geometric levels give every value the same relative
precision. Rounding is unbiased; rounded to nearest, a moving average that changes by less than a level per step would
never change.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST_BLOCK, LARGEST_BLOCK = 64, 256

_SIGNED_LEVELS, _SIGNED_DECADES = 127, 4.0
_UNSIGNED_LEVELS, _UNSIGNED_DECADES = 255, 8.0


def block_size(last_dim: int) -> int | None:
    """Return the largest power of two from 64 to 256 that divides the last dimension, or None.

    >>> block_size(4096), block_size(4096 + 64), block_size(100)
    (256, 64, None)
    """
    size = math.gcd(last_dim, LARGEST_BLOCK)
    return size if size >= SMALLEST_BLOCK else None


def quantise_signed(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [blocks, size] to uint8 codes and [blocks, 1] scales; `noise` is uniform in [0, 1)."""
    scale = x.abs().amax(dim=1, keepdim=True)
    magnitude = _quantise(x.abs() / scale.clamp(min=1e-38), noise, _SIGNED_LEVELS, _SIGNED_DECADES)
    return torch.where(x < 0, 128 + magnitude, magnitude).to(torch.uint8), scale


def dequantise_signed(codes: Tensor, scale: Tensor) -> Tensor:
    """Dequantise to fp32."""
    magnitude = _level((codes & 127).float(), _SIGNED_LEVELS, _SIGNED_DECADES)
    return torch.where(codes >= 128, -magnitude, magnitude) * scale


def quantise_unsigned(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise non-negative values; a positive value never becomes zero, because the update divides by it."""
    scale = x.amax(dim=1, keepdim=True)
    codes = _quantise(x / scale.clamp(min=1e-38), noise, _UNSIGNED_LEVELS, _UNSIGNED_DECADES)
    return torch.where(x > 0, codes.clamp(min=1), 0).to(torch.uint8), scale


def dequantise_unsigned(codes: Tensor, scale: Tensor) -> Tensor:
    """Dequantise to fp32."""
    return _level(codes.float(), _UNSIGNED_LEVELS, _UNSIGNED_DECADES) * scale


def _level(code: Tensor, levels: int, decades: float) -> Tensor:
    """Return the value of a code: 0 for 0; codes 1 to `levels` rise geometrically over the decades to 1."""
    rate = decades * math.log(10.0) / (levels - 1)
    return torch.where(code > 0, torch.exp((code - levels) * rate), 0.0)


def _quantise(x: Tensor, noise: Tensor, levels: int, decades: float) -> Tensor:
    rate = decades * math.log(10.0) / (levels - 1)
    exact = levels + torch.log(x.clamp(min=1e-30)) / rate
    below = exact.floor().clamp(0, levels - 1)
    low, high = _level(below, levels, decades), _level(below + 1, levels, decades)
    return below + (noise < (x - low) / (high - low))
