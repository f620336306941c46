"""GPTQ: round column by column, later columns correct the error (Frantar et al., 2022)."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.compress.scheme import Scheme
from piledriver.compress.second_order import compensate
from piledriver.kernels.column_loop import ColumnStep
from piledriver.kernels.linear import QuantisedWeight, weight_grid

_FP8_MAX = 448.0


class _RoundColumns:
    """Rounds columns to the grid of their group; the grid is fixed, or made when its first column is reached."""

    def __init__(self, weight: Tensor, scheme: Scheme, order: Tensor, *, static: bool) -> None:
        self.scheme = scheme
        self.grid = weight_grid(weight, scheme.weights, group=scheme.group, symmetric=scheme.symmetric)
        self.dtype, self.static = weight.dtype, static
        self.width = weight.shape[1] // self.grid.scales.shape[1]
        self._group_of = order // self.width
        # [groups, rows] in fp32: what a column needs lies together.
        self._scales = self.grid.scales.float().t().contiguous()
        self._zeros = None if self.grid.zeros is None else self.grid.zeros.float().t().contiguous()

    def step(self, place: int, columns: Tensor, factors: Tensor) -> ColumnStep | None:
        """Return the grids of the columns, if they do not depend on the corrections."""
        if not self.static or self.grid.kind == "fp8":
            return None
        groups = self._group_of[place : place + len(columns)]
        low, high = (-127.0, 127.0) if self.grid.kind == "int8" else (-8.0, 7.0)
        if self._zeros is None:
            return ColumnStep(self._scales[groups], low=low, high=high)
        return ColumnStep(self._scales[groups], self._zeros[groups], low=0.0, high=15.0)

    def prepare(self, place: int, columns: Tensor, factors: Tensor) -> None:
        """Make the grid of a group from its columns as corrected so far, unless grids are static."""
        if self.static or place % self.width:
            return
        now = weight_grid(
            columns[: self.width].t().to(self.dtype),
            self.scheme.weights,
            group=self.scheme.group,
            symmetric=self.scheme.symmetric,
        )
        group = place // self.width
        self.grid.scales[:, group] = now.scales[:, 0]
        self._scales[group] = now.scales[:, 0].float()
        if self.grid.zeros is not None and self._zeros is not None and now.zeros is not None:
            self.grid.zeros[:, group] = now.zeros[:, 0]
            self._zeros[group] = now.zeros[:, 0].float()

    def apply(self, place: int, column: Tensor, out: Tensor) -> None:
        """Write the nearest values of the grid: `WeightGrid.values` of its `codes`, in few operations."""
        group = int(self._group_of[place])
        scale = self._scales[group]
        steps = column / scale
        if self.grid.kind == "fp8":
            steps = steps.clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).float()
        elif self._zeros is None:
            steps.round_().clamp_(-8.0, 7.0)
        else:
            zero = self._zeros[group]
            steps.round_().add_(zero).clamp_(0.0, 15.0).sub_(zero)
        torch.mul(steps, scale, out=out)


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    activation_order: bool = True,
    static_groups: bool = True,
    damping: float = 0.01,
) -> QuantisedWeight:
    """Return the quantised weight of [rows, columns].

    With `activation_order`, columns with the largest inputs come first, and groups are static: their scales are those
    of the original weight, so that the columns of a group stay together and no index is stored. Without it,
    `static_groups=False` computes the scales of a group when it is reached.

    >>> from piledriver.kernels.linear import dequantise_weight
    >>> x = torch.randn(256, 64) @ torch.randn(64, 64)
    >>> weight, scheme = torch.randn(8, 64), Scheme.named("w4a16-g32")
    >>> small = gptq(weight, x.t() @ x, scheme)
    >>> nearest = weight_grid(weight, "int4", group=32)
    >>> def error(w):
    ...     return float((x @ (w - weight).t()).square().sum())
    >>> error(dequantise_weight(small, torch.float32)) < error(nearest.values(nearest.codes(weight)))
    True
    """
    columns = weight.shape[1]
    order = torch.arange(columns, device=weight.device)
    if activation_order:
        order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    # A scale for each row spans all columns: it cannot be made from a part of them.
    static = static_groups or activation_order or scheme.weights != "int4"
    rule = _RoundColumns(weight.detach(), scheme, order, static=static)
    values = compensate(weight.detach(), hessian, rule, order=order, damping=damping)
    return rule.grid.pack(rule.grid.codes(values))
