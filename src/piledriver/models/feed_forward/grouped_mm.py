"""Grouped matrix multiplication: rows sorted by group, each group multiplied by its own matrix.

bf16 uses torch's grouped kernel, which needs no host synchronisation. Other dtypes, which the kernel does not fully
support, loop over groups: for tests and small models on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The kernel needs each group to start at a multiple of 16 bytes: 8 rows in bf16 once transposed for the gradient.
ROW_ALIGNMENT = 8


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Return rows [n, k] times matrices [groups, k, m]; group g owns the rows from ends[g - 1] to ends[g]."""
    out: Tensor
    if rows.dtype != torch.bfloat16:
        out = _by_group(rows, matrices, ends)
        return out
    out = F.grouped_mm(rows, matrices, offs=ends)
    return out


@torch.library.custom_op("piledriver::grouped_mm", mutates_args=())
def _by_group(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_empty(rows.shape[0], matrices.shape[2])
    for (begin, end), matrix in zip(_spans(ends), matrices, strict=True):
        torch.mm(rows[begin:end], matrix, out=out[begin:end])
    return out


@torch.library.custom_op("piledriver::grouped_mm_matrix_gradient", mutates_args=())
def _matrix_gradient(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_empty(ends.shape[0], rows.shape[1], gradient.shape[1])
    for group, (begin, end) in enumerate(_spans(ends)):
        torch.mm(rows[begin:end].t(), gradient[begin:end], out=out[group])
    return out


@_by_group.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@_matrix_gradient.register_fake
def _(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], gradient.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, matrices, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    return _by_group(gradient, matrices.transpose(1, 2), ends), _matrix_gradient(rows, gradient, ends), None


_by_group.register_autograd(_backward, setup_context=_keep)


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    places = ends.tolist()
    return list(zip([0, *places[:-1]], places, strict=True))
