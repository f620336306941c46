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
from piledriver.kernels.column_loop import ColumnStep
from piledriver.kernels.registry import fastest_kernel

WIDTH = 128
"""Columns that are corrected at once before the rest of the weight is."""


class ColumnRule(Protocol):
    """Decides what becomes of each column: for a whole part of the columns at once if it can, else one by one."""

    def step(self, place: int, columns: Tensor, factors: Tensor) -> ColumnStep | None:
        """Return what is stored for the part of the columns that begins at `place`; None to decide one by one.

        Arguments are those of `prepare`.
        """

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
    kernel = fastest_kernel("column_loop", work.device)
    for first in range(0, columns, WIDTH):
        last = min(first + WIDTH, columns)
        part, diagonal = work[first:last], factor.diagonal()[first:last]
        # Rows over their diagonal element: what an error of 1 changes in the columns after it.
        changes = factor[first:last] / diagonal[:, None]
        errors, inner = torch.empty_like(part), changes[:, first:last].contiguous()
        step = rule.step(first, part, diagonal)
        if step is not None:
            kernel.run(part, inner, step, out[first:last], errors)
        else:
            _one_by_one(rule, first, part, diagonal, inner, out[first:last], errors)
        work[last:].addmm_(changes[:, last:].t(), errors, alpha=-1.0)
    result = torch.empty_like(out)
    result[order] = out
    return result.t()


def _one_by_one(
    rule: ColumnRule, first: int, part: Tensor, diagonal: Tensor, changes: Tensor, out: Tensor, errors: Tensor
) -> None:
    """Treat the columns of a part whose rule sees each column as corrected so far."""
    rows = zip(part.unbind(), out.unbind(), errors.unbind(), changes.unbind(), strict=True)
    for index, (column, stored, error, change) in enumerate(rows):
        rule.prepare(first + index, part[index:], diagonal[index:])
        rule.apply(first + index, column, stored)
        torch.sub(column, stored, out=error)
        part[index + 1 :].addr_(change[index + 1 :], error, alpha=-1.0)


def inverse_factor(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a matrix in fp64.

    With columns and rows in reverse order, H = L L^T turns into H = R R^T with an upper R, whose inverse is the factor:
    one factorisation and one triangular inverse, and no inverse of the whole matrix.

    >>> x = torch.randn(8, 4, dtype=torch.float64)
    >>> upper = inverse_factor(x.t() @ x)
    >>> torch.allclose(upper.t() @ upper @ x.t() @ x, torch.eye(4, dtype=torch.float64), atol=1e-6)
    True
    """
    lower, failed = torch.linalg.cholesky_ex(hessian.flip(0, 1))
    if int(failed):
        raise UsageError("the Hessian of the calibration inputs is not positive definite", fix="raise damping")
    identity = torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
    return inverse.flip(0, 1)
