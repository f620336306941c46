"""Stochastic rounding with counter-based noise: unbiased, reproducible, independent of how tensors are sharded.

The noise of an element is a hash of (salt, its index in the whole parameter): no generator state to save, nothing that
a different layout could change, and plain integer arithmetic that a compiler fuses.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW_32 = 0xFFFFFFFF


APART = 0x3C6EF35F
"""Odd and large: with its number times this, each parameter of a step gets noise far from the others'."""


def noise_bits(rows: int, columns: int, first_index: Tensor | int, salt: Tensor | int, device: torch.device) -> Tensor:
    """[rows, columns] of 32 random bits each (as int64), for consecutive indices from `first_index` on."""
    row_index = torch.arange(rows, device=device, dtype=torch.int64)[:, None] * columns
    index = first_index + row_index + torch.arange(columns, device=device, dtype=torch.int64)
    return hash_bits(index, salt)


def hash_bits(index: Tensor, salt: Tensor | int) -> Tensor:
    """32 random bits (as int64) for each index."""
    # A 32-bit finaliser (multiply and xor-shift), started from an index spread by the golden ratio (0x9E3779B1, less
    # 2**32: compiled, an index is an int32, which no larger number may be multiplied with).
    bits = (index * -0x61C8864F + salt) & _LOW_32
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _LOW_32
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _LOW_32
    return bits ^ (bits >> 16)


def round_to_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, up or down with the probability that keeps the mean.

    >>> x = torch.full((1, 10000), 1.001)
    >>> bits = noise_bits(1, 10000, 0, 7, x.device)
    >>> bool((round_to_bf16(x, bits).float().mean() - 1.001).abs() < 2e-4)
    True
    """
    # bf16 is the upper half of fp32: adding noise to the lower half carries into it as often as it should.
    noisy = x.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (noisy & -65536).view(torch.float32).to(torch.bfloat16)
