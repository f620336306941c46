"""Newton-Schulz iteration: the orthogonal factor of a matrix, as Muon uses it (Jordan et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

# The quintic whose slope at zero is largest while all singular values stay near one.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(
    matrices: Tensor, *, steps: int = 5, eps: float = 1e-7, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return the approximate orthogonal factor of [..., rows, columns], with singular values from 0.5 to 1.5.

    `dtype` is what the iteration runs in, and what is returned.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.to(dtype)
    tall = matrices.shape[-2] > matrices.shape[-1]
    if tall:
        x = x.transpose(-2, -1)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    x = x.flatten(0, -3) if x.dim() > 3 else x
    fma = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.transpose(-2, -1)
        polynomial = fma(gram, gram, gram, beta=b, alpha=c)
        x = fma(x, polynomial, x, beta=a)
    x = x.transpose(-2, -1) if tall else x
    return x.reshape(matrices.shape)
