"""Which linear kernel runs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.decode import rms_norm
from piledriver.kernels.linear.dequantise import dequantise_integers
from piledriver.kernels.linear.gemv import fits_gemv, gemv
from piledriver.kernels.linear.integers.gemv import fits_integer_gemv, integer_gemv
from piledriver.kernels.linear.integers.rows import fits_integer_rows, integer_rows, most_rows
from piledriver.kernels.linear.invariant_row import fits_invariant_row, invariant_row_linear
from piledriver.kernels.linear.weights import GROUP, QuantisedWeight, dequantise_weight
from piledriver.kernels.registry import HAS_TRITON, fastest_kernel

_MOST_ROWS = 64
"""Up to this many rows a product is bound by reading the weight; beyond, torch's own kernels are faster."""
_MOST_INTEGER_ROWS = {"int4": 128, "int8": 512}
"""The same for weights that torch's kernels need dequantised."""


def linear(
    x: Tensor,
    weight: Tensor | QuantisedWeight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate_block: int = 0,
    norm: Tensor | None = None,
    eps: float = 0.0,
    invariant: bool = False,
) -> Tensor:
    """Return x @ weight.T (+ bias) of [rows, columns], then silu(gate) * up if `gate_block`, then + residual.

    With `norm`, the weight of an RMS norm with `eps`, x is normalised first.

    With `gate_block`, rows of the weight alternate in blocks of that size: gate, up, gate, up. `invariant` promises
    that a row's bits do not depend on the number of rows.
    """
    kernel: Any = fastest_kernel("linear", x.device)
    if x.is_cuda and isinstance(weight, QuantisedWeight) and not _has_gpu_kernel(weight):
        weight = dequantise_weight(weight, x.dtype)
    options: dict[str, Any] = {"bias": bias, "residual": residual, "gate_block": gate_block, "norm": norm, "eps": eps}
    if x.is_cuda and HAS_TRITON and invariant and isinstance(weight, Tensor) and fits_invariant_row(x, weight):
        return invariant_row_linear(x, weight, **options)
    if x.is_cuda and HAS_TRITON and not invariant:
        if isinstance(weight, QuantisedWeight) and fits_integer_gemv(x, weight, norm):
            return integer_gemv(x, weight, **options)
        if fits_gemv(x, weight):
            return gemv(x, weight, **options)
        if (
            isinstance(weight, QuantisedWeight)
            and len(x) <= most_rows(weight, gate=gate_block > 0)
            and fits_integer_rows(x, weight)
        ):
            return integer_rows(x, weight, **options)
        kind = weight.kind if isinstance(weight, QuantisedWeight) else ""
        if len(x) > _MOST_INTEGER_ROWS.get(kind, _MOST_ROWS):
            rows = x if norm is None else rms_norm(x, norm, eps)
            return _large(rows, weight, bias, residual, gate_block)
    out: Tensor = kernel(x, weight, **options, invariant=invariant)
    return out


def _has_gpu_kernel(weight: QuantisedWeight) -> bool:
    """Return whether GPU kernels read this weight: 8 bits with a scale a row, int4 in symmetric groups of `GROUP`."""
    if weight.kind != "int4":
        return weight.scales.shape[1] == 1
    return weight.zeros is None and weight.group == GROUP


def _plain(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    return dequantise_weight(weight, dtype) if weight.kind == "fp8" else dequantise_integers(weight, dtype)


def _large(
    x: Tensor, weight: Tensor | QuantisedWeight, bias: Tensor | None, residual: Tensor | None, gate_block: int
) -> Tensor:
    plain = _plain(weight, x.dtype) if isinstance(weight, QuantisedWeight) else weight
    if gate_block:
        out: Tensor = fastest_kernel("gated_mlp", x.device).forward(F.linear(x, plain, bias), gate_block)
        return out if residual is None else out + residual
    if residual is not None and bias is None:
        return torch.addmm(residual, x, plain.t())
    out = F.linear(x, plain, bias)
    return out if residual is None else out + residual
