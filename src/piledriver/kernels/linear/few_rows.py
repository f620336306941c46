"""Products of a few rows on a CPU, by what is fastest in OpenBLAS."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROW_BY_ROW = 3
"""Rows up to which products of the weight with one vector each are faster: they run at the rate of memory."""
_MOST_ROWS = 15
"""Deterministic mode on a CPU computes tiles of 16 rows, whose order of sums must not change."""


def few_rows_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias of [..., columns]; for 2 to 15 rows in fp32 row by row, or as (weight @ x.T).T.

    With the weight on the right OpenBLAS is no faster, and several times slower on a busy machine.

    >>> x, weight = torch.randn(2, 3, 8), torch.randn(5, 8)
    >>> with torch.no_grad():
    ...     torch.allclose(few_rows_linear(x, weight), F.linear(x, weight), atol=1e-5)
    True
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not (_is_plain(x) and _is_plain(weight)):
        return F.linear(x, weight, bias)
    rows = x.numel() // max(x.shape[-1], 1)
    if not 1 < rows <= _MOST_ROWS or not uses_openblas():
        return F.linear(x, weight, bias)
    flat = x.reshape(rows, -1)
    if rows <= _ROW_BY_ROW:
        out = torch.stack([torch.mv(weight, row) for row in flat])
    else:
        out = torch.mm(weight, flat.t()).t().contiguous()
    return torch.unflatten(out if bias is None else out + bias, 0, x.shape[:-1])


def _is_plain(tensor: Tensor) -> bool:
    kind = type(tensor)
    return (kind is Tensor or kind is nn.Parameter) and tensor.is_cpu and tensor.dtype == torch.float32


@functools.cache
def uses_openblas() -> bool:
    """Return whether torch's products on a CPU are OpenBLAS's."""
    return not torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
