"""Stochastic rounding with counter-based noise, and fp32 split into a bf16 number and its remainder.

The noise of an element is a hash of (salt, its index in the whole parameter): there is no generator state to save, a
different layout rounds the same way, and it is plain integer arithmetic that a compiler fuses.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF

NOISE_STRIDE = 0x3C6EF35F
"""Odd and large: its number times this keeps each parameter's noise of a step apart from the others'."""


def noise_bits(rows: int, columns: int, first_index: Tensor | int, salt: Tensor | int, device: torch.device) -> Tensor:
    """Return [rows, columns] of 32 random bits each (as int64), for consecutive indices from `first_index`."""
    row_index = torch.arange(rows, device=device, dtype=torch.int64)[:, None] * columns
    index = first_index + row_index + torch.arange(columns, device=device, dtype=torch.int64)
    return hash_bits(index, salt)


def hash_bits(index: Tensor, salt: Tensor | int) -> Tensor:
    """Return 32 random bits (as int64) for each index."""
    # A 32-bit finaliser (multiply and xor-shift), started from an index spread by the golden ratio (0x9E3779B1, less
    # 2**32: compiled, an index is an int32, which cannot be multiplied by a larger number).
    bits = (index * -0x61C8864F + salt) & _LOW_32
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _LOW_32
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _LOW_32
    return bits ^ (bits >> 16)


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Round fp32 to bf16, up or down with the probability that keeps the mean.

    >>> x = torch.full((1, 10000), 1.001)
    >>> bits = noise_bits(1, 10000, 0, 7, x.device)
    >>> bool((round_to_bf16(x, bits).float().mean() - 1.001).abs() < 2e-4)
    True
    """
    # bf16 is the upper half of fp32: noise added to the lower half carries into it with the right probability.
    noisy = x.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (noisy & -65536).view(torch.float32).to(torch.bfloat16)


def join_fp32(high: Tensor, low: Tensor) -> Tensor:
    """Return the fp32 number whose nearest bf16 is `high` and whose remaining bits are `low` (int16)."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def split_fp32(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into the nearest bf16 (ties away from zero) and the remaining bits (int16).

    >>> numbers = torch.randn(1000)
    >>> high, low = split_fp32(numbers)
    >>> torch.equal(join_fp32(high, low), numbers), bool((high.float() - numbers).abs().max() < 0.01)
    (True, True)
    """
    bits = x.view(torch.int32)
    # Rounding up the bits of a NaN would make a number of it.
    upper = torch.where(x.isnan(), 0x7FC0, (bits + 0x8000) >> 16)
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)
