"""Round or remove columns of a weight one by one, and correct the columns that follow for each error.

The optimal correction follows from the inverse of the Hessian (Hassibi and Stork, Optimal Brain Surgeon, 1993). GPTQ
(Frantar et al., 2022) and SparseGPT (Frantar and Alistarh, 2023) share it: all rows in one order of the columns, with
the inverse Hessians of all steps taken from one Cholesky factor.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from piledriver.core.errors import UsageError

WIDTH = 128
"""Columns that are corrected at once before the rest of the weight is."""


class ColumnRule(Protocol):
    """Decides what becomes of each column."""

    def prepare(self, place: int, columns: Tensor, factors: Tensor) -> None:
        """See column `place` in the order of the columns, and those after it in its part of `WIDTH` columns.

        `columns` is [columns, rows], corrected so far; `factors` are the diagonal of the Cholesky factor, [columns].
        """

    def apply(self, place: int, column: Tensor, out: Tensor) -> None:
        """Write what is stored for a column to `out`."""


@torch.no_grad()
def compensate(
    weight: Tensor, hessian: Tensor, rule: ColumnRule, *, order: Tensor | None = None, damping: float = 0.01
) -> Tensor:
    """Return [rows, columns] in fp32: what `rule` makes of each column, the errors corrected by later columns.

    `order` is the order of the columns. `damping` times the mean of the Hessian's diagonal is added to it. Columns
    whose input is always 0 become 0.
    """
    columns = weight.shape[1]
    order = torch.arange(columns, device=weight.device) if order is None else order
    work = weight.float().t()[order].contiguous()
    wide = hessian.double()[order][:, order]
    dead = wide.diagonal() == 0
    wide.diagonal()[dead] = 1.0
    work[dead] = 0.0
    wide.diagonal().add_(damping * wide.diagonal().mean())
    factor = inverse_factor(wide).float()
    out = torch.empty_like(work)
    for first in range(0, columns, WIDTH):
        last = min(first + WIDTH, columns)
        part, diagonal = work[first:last], factor.diagonal()[first:last]
        # Rows over their diagonal element: what an error of 1 changes in the columns after it.
        changes = factor[first:last] / diagonal[:, None]
        errors = torch.empty_like(part)
        # Few and small operations: each column waits for the one before it.
        rows = zip(part.unbind(), out[first:last].unbind(), errors.unbind(), changes.unbind(), strict=True)
        for index, (column, stored, error, change) in enumerate(rows):
            rule.prepare(first + index, part[index:], diagonal[index:])
            rule.apply(first + index, column, stored)
            torch.sub(column, stored, out=error)
            part[index + 1 :].addr_(change[first + index + 1 : last], error, alpha=-1.0)
        work[last:].addmm_(changes[:, last:].t(), errors, alpha=-1.0)
    result = torch.empty_like(out)
    result[order] = out
    return result.t()


def inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a matrix in fp64."""
    lower, failed = torch.linalg.cholesky_ex(hessian)
    if int(failed):
        raise UsageError("the Hessian of the calibration inputs is not positive definite", fix="raise damping")
    upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return upper
