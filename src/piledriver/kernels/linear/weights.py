"""Quantised weights: round to nearest, symmetric, with a scale for each row (int8, fp8) or group of 128 (int4)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from piledriver.core.errors import UsageError

WeightKind = Literal["int8", "int4", "fp8"]
GROUP = 128
"""Consecutive input columns that share a scale in int4."""
_HALF = GROUP // 2
_FP8_MAX = 448.0


class QuantisedWeight(NamedTuple):
    """A weight of [rows, columns] in 8 or 4 bits."""

    kind: WeightKind
    data: Tensor
    """int8 or float8_e4m3fn [rows, columns]; uint8 [rows, columns / 2] byte j of a group has columns j, j + 64."""
    scales: Tensor
    """[rows, 1], or [rows, columns / GROUP] for int4."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self.data.shape[0], self.data.shape[1] * (2 if self.kind == "int4" else 1)


def quantise_weight(weight: Tensor, kind: WeightKind) -> QuantisedWeight:
    """Round a weight to the nearest values of `kind`.

    >>> weight = torch.randn(4, 256)
    >>> error = dequantise_weight(quantise_weight(weight, "int8"), torch.float32) - weight
    >>> bool(error.abs().max() < weight.abs().max() / 127)
    True
    """
    wide = weight.detach().float()
    if kind == "int4":
        if weight.shape[1] % GROUP:
            raise UsageError(
                f"int4 needs columns in groups of {GROUP}, the weight has {weight.shape[1]}", fix="use int8 there"
            )
        groups = wide.unflatten(1, (-1, GROUP))  # type: ignore[no-untyped-call]
        scales = groups.abs().amax(dim=-1).clamp(min=1e-12) / 7.0
        scales = scales.to(weight.dtype)
        values = (groups / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int16) + 8
        packed = values[..., :_HALF] | (values[..., _HALF:] << 4)
        return QuantisedWeight(kind, packed.to(torch.uint8).flatten(1), scales.contiguous())
    most = 127.0 if kind == "int8" else _FP8_MAX
    scales = (wide.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / most).to(weight.dtype)
    scaled = wide / scales.float()
    if kind == "int8":
        return QuantisedWeight(kind, scaled.round().clamp(-127, 127).to(torch.int8), scales)
    return QuantisedWeight(kind, scaled.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scales)


def dequantise_weight(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight that the quantised one stands for."""
    if weight.kind == "int4":
        groups = weight.data.unflatten(1, (-1, _HALF))  # type: ignore[no-untyped-call]
        values = torch.cat((groups & 15, groups >> 4), dim=-1).float() - 8.0
        return (values * weight.scales.float()[..., None]).flatten(1).to(dtype)
    return (weight.data.float() * weight.scales.float()).to(dtype)
