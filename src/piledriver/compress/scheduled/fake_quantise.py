"""Rounding with gradients that pass through, for weights in groups and activations by token."""

from __future__ import annotations

import torch
from torch import Tensor


def fake_quantise_groups(weight: Tensor, bits: int, groups: int, *, symmetric: bool) -> Tensor:
    """Return a weight rounded to `bits`, with a scale (and zero point) for each of equal parts of it, flattened.

    >>> fake_quantise_groups(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), 2, 1, symmetric=False)
    tensor([[0., 1., 2., 3.]])
    """
    with torch.no_grad():
        parts = weight.detach().float().reshape(groups, -1)
        difference = _rounded(parts, bits, symmetric).view_as(weight).to(weight.dtype) - weight
    return weight + difference


def fake_quantise_tokens(x: Tensor, bits: int, *, symmetric: bool, limits: Tensor | None = None) -> Tensor:
    """Return activations rounded to `bits`, by the range of each token, or by `limits` [2] (lowest, highest)."""
    with torch.no_grad():
        wide = x.detach().float()
        difference = _rounded(wide, bits, symmetric, limits).to(x.dtype) - x
    return x + difference


def _rounded(x: Tensor, bits: int, symmetric: bool, limits: Tensor | None = None) -> Tensor:
    low = x.amin(dim=-1, keepdim=True) if limits is None else limits[0]
    high = x.amax(dim=-1, keepdim=True) if limits is None else limits[1]
    if symmetric:
        most = 2 ** (bits - 1) - 1
        scale = torch.maximum(low.abs(), high.abs()).clamp(min=1e-12) / max(most, 1)
        rounded: Tensor = (x / scale).round().clamp(-most - 1, most) * scale
        return rounded
    scale = (high - low).clamp(min=1e-12) / (2**bits - 1)
    shifted: Tensor = ((x - low) / scale).round().clamp(0, 2**bits - 1) * scale + low
    return shifted
