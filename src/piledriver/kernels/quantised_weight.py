"""Quantised weights: int8, fp8 with a scale for each row or group, int4 with one (and a zero point) for each group."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from piledriver.core.errors import UsageError

WeightKind = Literal["int8", "int4", "fp8"]
GROUP = 128
"""Default number of consecutive input columns that share a scale in int4."""
GROUPS = (32, 64, 128)
"""Group sizes of int4."""
_FP8_MAX = 448.0


class QuantisedWeight(NamedTuple):
    """A weight of [rows, columns] in 8 or 4 bits."""

    kind: WeightKind
    data: Tensor
    """int8 or float8_e4m3fn [rows, columns]; for int4 uint8 [rows, columns / 2], where byte j of a group of g columns
    holds columns j (low bits) and j + g / 2."""
    scales: Tensor
    """[rows, 1], or [rows, columns / group] for int4 and for fp8 in groups."""
    zeros: Tensor | None = None
    """uint8 [rows, columns / group]: the code that means 0, for asymmetric int4; None for 8."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return self.data.shape[0], self.data.shape[1] * (2 if self.kind == "int4" else 1)

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.scales.shape[1]


class WeightGrid(NamedTuple):
    """The values that a quantised weight can take: scale * (code - zero point), for each group of each row."""

    kind: WeightKind
    scales: Tensor
    """[rows, groups], in the dtype in which they are stored."""
    zeros: Tensor | None = None
    """[rows, groups] of uint8, for asymmetric int4."""

    def columns(self, first: int, last: int) -> WeightGrid:
        """Return the grid of groups `first` to `last` (exclusive)."""
        zeros = None if self.zeros is None else self.zeros[:, first:last]
        return WeightGrid(self.kind, self.scales[:, first:last], zeros)

    def codes(self, weight: Tensor) -> Tensor:
        """Return the nearest codes of [rows, columns], in fp32: 0 to 15 for int4, -127 to 127 for int8, fp8 values."""
        scaled = self._grouped(weight.float()) / self.scales.float()[..., None]
        if self.kind == "int4":
            codes = (scaled.round() + self._zeros()).clamp(0, 15)
        elif self.kind == "int8":
            codes = scaled.round().clamp(-127, 127)
        else:
            codes = scaled.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).float()
        return codes.flatten(1)

    def values(self, codes: Tensor) -> Tensor:
        """Return what codes stand for, in fp32."""
        codes = self._grouped(codes)
        if self.kind == "int4":
            codes = codes - self._zeros()
        return (codes * self.scales.float()[..., None]).flatten(1)

    def pack(self, codes: Tensor) -> QuantisedWeight:
        """Return the quantised weight with these codes, row by row in memory, as kernels read it."""
        if self.kind == "fp8":
            return QuantisedWeight(self.kind, codes.to(torch.float8_e4m3fn).contiguous(), self.scales)
        if self.kind == "int8":
            return QuantisedWeight(self.kind, codes.to(torch.int8).contiguous(), self.scales)
        low, high = self._grouped(codes).to(torch.uint8).chunk(2, dim=-1)
        return QuantisedWeight(self.kind, (low | (high << 4)).flatten(1).contiguous(), self.scales, self.zeros)

    def _grouped(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, 1, (self.scales.shape[1], -1))

    def _zeros(self) -> Tensor | float:
        return 8.0 if self.zeros is None else self.zeros.float()[..., None]


def weight_grid(
    weight: Tensor, kind: WeightKind, *, group: int | None = None, symmetric: bool = True, clip: Tensor | None = None
) -> WeightGrid:
    """Return the grid that spans a weight of [rows, columns]; scales are in the weight's dtype.

    `group` is the number of columns that share a scale (default: `GROUP` for int4, otherwise all), `symmetric` applies
    to int4. `clip` of [rows, groups] (or one that broadcasts) shrinks each range.
    """
    wide = weight.detach().float()
    if kind != "int4":
        if group is not None and weight.shape[1] % group:
            raise UsageError(
                f"{kind} with groups of {group} columns does not fit a weight of {weight.shape[1]} columns",
                fix="use a group that divides the columns, or a scale for each row",
            )
        most = 127.0 if kind == "int8" else _FP8_MAX
        spans = torch.unflatten(wide, 1, (-1, group or weight.shape[1]))
        scales = spans.abs().amax(dim=-1).clamp(min=1e-12) / most
        return WeightGrid(kind, scales.to(weight.dtype).contiguous())
    group = GROUP if group is None else group
    if group not in GROUPS or weight.shape[1] % group:
        raise UsageError(
            f"int4 with groups of {group} columns does not fit a weight of {weight.shape[1]} columns",
            fix=f"use a group of {', '.join(map(str, GROUPS))} that divides the columns, or int8 there",
        )
    groups = torch.unflatten(wide, 1, (-1, group))
    shrink = 1.0 if clip is None else clip
    if symmetric:
        scales = (groups.abs().amax(dim=-1) * shrink).clamp(min=1e-12) / 7.0
        return WeightGrid(kind, scales.to(weight.dtype).contiguous())
    low, high = groups.amin(dim=-1).clamp(max=0.0) * shrink, groups.amax(dim=-1).clamp(min=0.0) * shrink
    scales = ((high - low).clamp(min=1e-12) / 15.0).to(weight.dtype)
    zeros = (-low / scales.float()).round().clamp(0, 15).to(torch.uint8)
    return WeightGrid(kind, scales.contiguous(), zeros)


def quantise_weight(
    weight: Tensor, kind: WeightKind, *, group: int | None = None, symmetric: bool = True
) -> QuantisedWeight:
    """Round a weight to the nearest values of `kind`.

    >>> weight = torch.randn(4, 256)
    >>> error = dequantise_weight(quantise_weight(weight, "int8"), torch.float32) - weight
    >>> bool(error.abs().max() < weight.abs().max() / 127)
    True
    """
    grid = weight_grid(weight, kind, group=group, symmetric=symmetric)
    return grid.pack(grid.codes(weight.detach()))


def weight_codes(weight: QuantisedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the codes of a quantised weight, [rows, columns]: the inverse of `WeightGrid.pack`."""
    if weight.kind != "int4":
        return weight.data.to(dtype)
    groups = torch.unflatten(weight.data, 1, (-1, weight.group // 2))
    return torch.cat((groups & 15, groups >> 4), dim=-1).flatten(1).to(dtype)


def dequantise_weight(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight that the quantised one stands for."""
    return WeightGrid(weight.kind, weight.scales, weight.zeros).values(weight_codes(weight)).to(dtype)
