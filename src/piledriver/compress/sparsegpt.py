"""Which weights to remove: by magnitude, by Wanda, or by SparseGPT, which also corrects the weights that stay."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.compress.second_order import compensate
from piledriver.core.errors import UsageError
from piledriver.kernels.column_loop import ColumnStep


def smallest(scores: Tensor, sparsity: float) -> Tensor:
    """Return a mask of the share `sparsity` of each row with the smallest scores; ties go to earlier columns."""
    count = round(scores.shape[1] * sparsity)
    mask = torch.zeros_like(scores, dtype=torch.bool)
    order = torch.argsort(scores, dim=1, stable=True)
    return mask.scatter_(1, order[:, :count], True)


def smallest_of_each(scores: Tensor, kept: int, width: int) -> Tensor:
    """Return a mask that keeps the `kept` largest of every `width` consecutive scores of a row (n:m sparsity).

    >>> smallest_of_each(torch.tensor([[4.0, 1.0, 3.0, 2.0]]), 2, 4)
    tensor([[False,  True, False,  True]])
    """
    if scores.shape[1] % width:
        raise UsageError(
            f"{kept}:{width} sparsity does not fit a weight of {scores.shape[1]} columns", fix="skip that layer"
        )
    groups = torch.unflatten(scores, 1, (-1, width))
    order = torch.argsort(groups, dim=-1, stable=True)
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., : width - kept], True)
    return mask.flatten(1)


class _RemoveColumns:
    """Chooses weights by w^2 / d^2, their cost after correction, in every part of the columns, and removes them."""

    def __init__(self, sparsity: float, pattern: tuple[int, int] | None) -> None:
        self.sparsity, self.pattern = sparsity, pattern
        self.kept = torch.empty(0)
        self.first = 0

    def step(self, place: int, columns: Tensor, factors: Tensor) -> ColumnStep | None:
        """Choose the weights to remove from a part of the columns; those of a pattern wait for the corrections."""
        if self.pattern is not None:
            return None
        scores = (columns / factors[:, None]).square().t()
        # All rows of a part together: rows may differ in how many weights they lose.
        mask = smallest(scores.reshape(1, -1), self.sparsity).view_as(scores)
        return ColumnStep(kept=(~mask).t().to(columns.dtype).contiguous())

    def prepare(self, place: int, columns: Tensor, factors: Tensor) -> None:
        """Choose the weights to remove from the next columns of a pattern."""
        assert self.pattern is not None
        width = self.pattern[1]
        if place % width:
            return
        scores = (columns[:width] / factors[:width, None]).square().t()
        self.kept = (~smallest_of_each(scores, *self.pattern)).t().to(columns.dtype).contiguous()
        self.first = place

    def apply(self, place: int, column: Tensor, out: Tensor) -> None:
        """Write the column with its chosen weights set to 0."""
        torch.mul(column, self.kept[place - self.first], out=out)


def sparsegpt(
    weight: Tensor,
    hessian: Tensor,
    sparsity: float = 0.5,
    *,
    pattern: tuple[int, int] | None = None,
    damping: float = 0.01,
) -> Tensor:
    """Return the weight with a share of it removed and the rest corrected (Frantar and Alistarh, 2023).

    `pattern` (n, m) keeps n of every m consecutive weights of a row instead.
    """
    if pattern is not None and weight.shape[1] % pattern[1]:
        raise UsageError(
            f"{pattern[0]}:{pattern[1]} sparsity does not fit a weight of {weight.shape[1]} columns",
            fix="skip that layer",
        )
    found = compensate(weight.detach(), hessian, _RemoveColumns(sparsity, pattern), damping=damping)
    return found.to(weight.dtype)


def importance(weight: Tensor, hessian: Tensor | None) -> Tensor:
    """Return |weight|, times the norm of its input where second moments are given (Wanda: Sun et al., 2023)."""
    size = weight.detach().float().abs()
    return size if hessian is None else size * hessian.diagonal().clamp(min=0).sqrt()
