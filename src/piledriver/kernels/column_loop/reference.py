"""The column loop in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from piledriver.kernels.registry import Kernel


class ColumnStep(NamedTuple):
    """What is stored for each column of a part: the nearest values of a grid, or the weights that are kept."""

    scales: Tensor | None = None
    """[columns, rows] in fp32: the distance of two values of the grid."""
    zeros: Tensor | None = None
    """[columns, rows] in fp32: the code that stands for 0; None for 0."""
    low: float = 0.0
    """Smallest code."""
    high: float = 0.0
    """Largest code."""
    kept: Tensor | None = None
    """[columns, rows] in fp32: 1 for weights that stay, 0 for those that are removed; instead of a grid."""

    def stored(self, index: int, column: Tensor, out: Tensor) -> None:
        """Write what is stored for column `index` of the part to `out`."""
        if self.kept is not None:
            torch.mul(column, self.kept[index], out=out)
            return
        assert self.scales is not None
        codes = (column / self.scales[index]).round_()
        if self.zeros is None:
            codes.clamp_(self.low, self.high)
        else:
            codes.add_(self.zeros[index]).clamp_(self.low, self.high).sub_(self.zeros[index])
        torch.mul(codes, self.scales[index], out=out)


class ReferenceColumnLoop(Kernel):
    """One column at a time, in few and small operations: each column waits for the one before it."""

    def run(self, part: Tensor, changes: Tensor, step: ColumnStep, out: Tensor, errors: Tensor) -> None:
        """Write what is stored for the columns of `part` and their errors to `out` and `errors`, [columns, rows].

        `changes` is [columns, columns]: an error of 1 in column i lowers column j > i by changes[i, j]. `part` is used
        as working memory.
        """
        rows = zip(part.unbind(), out.unbind(), errors.unbind(), changes.unbind(), strict=True)
        for index, (column, stored, error, change) in enumerate(rows):
            step.stored(index, column, stored)
            torch.sub(column, stored, out=error)
            part[index + 1 :].addr_(change[index + 1 :], error, alpha=-1.0)
