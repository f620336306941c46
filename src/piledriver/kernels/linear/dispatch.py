"""Which linear kernel runs."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.decode import rms_norm
from piledriver.kernels.linear.dequantise import dequantise_integers
from piledriver.kernels.linear.gemv import fits_gemv, gemv
from piledriver.kernels.linear.integers.gemv import fits_integer_gemv, integer_gemv
from piledriver.kernels.linear.integers.rows import fits_integer_rows, integer_rows, most_rows
from piledriver.kernels.linear.integers.tiles import integer_tiles
from piledriver.kernels.linear.invariant_row import fits_invariant_row, invariant_row_linear
from piledriver.kernels.linear.mixed import fits_mixed, mixed
from piledriver.kernels.linear.tuned import tuned_kernel
from piledriver.kernels.linear.weights import GROUP, QuantisedWeight, dequantise_weight
from piledriver.kernels.registry import HAS_TRITON, fastest_kernel

_MOST_ROWS = 64
"""Up to this many rows a product is bound by reading the weight; beyond, torch's own kernels are faster."""


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
        if isinstance(weight, QuantisedWeight) and weight.kind != "fp8":
            return _integers(x, weight, **options)
        if fits_gemv(x, weight):
            return gemv(x, weight, **options)
        if len(x) > _MOST_ROWS:
            rows = x if norm is None else rms_norm(x, norm, eps)
            plain = dequantise_weight(weight, x.dtype) if isinstance(weight, QuantisedWeight) else weight
            return _finish(F.linear, rows, plain, bias, residual, gate_block)
    out: Tensor = kernel(x, weight, **options, invariant=invariant)
    return out


def _integers(
    x: Tensor,
    weight: QuantisedWeight,
    *,
    bias: Tensor | None,
    residual: Tensor | None,
    gate_block: int,
    norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Return the linear layer with an int8 or int4 weight, by the kernel that is fastest for this number of rows."""
    options: dict[str, Any] = {"bias": bias, "residual": residual, "norm": norm, "eps": eps}
    if fits_integer_gemv(x, weight, norm):
        return integer_gemv(x, weight, **options, gate_block=gate_block)
    if gate_block and len(x) <= _MOST_ROWS:
        few = len(x) <= most_rows(weight, gate=True) and fits_integer_rows(x, weight)
        kernel: Any = integer_rows if few else integer_tiles
        return cast(Tensor, kernel(x, weight, **options, gate_block=gate_block))
    chosen = tuned_kernel(weight, len(x))
    if chosen["kernel"] == "rows" and fits_integer_rows(x, weight):
        return integer_rows(x, weight, **options)
    if chosen["kernel"] == "dequantised" or (chosen["kernel"] == "mixed" and not fits_mixed(x)):
        rows = x if norm is None else rms_norm(x, norm, eps)
        return _finish(F.linear, rows, dequantise_integers(weight, x.dtype), bias, residual, gate_block)
    tile = None if chosen["kernel"] == "rows" else chosen
    product: Any = mixed if chosen["kernel"] == "mixed" else integer_tiles
    if not gate_block:
        return cast(Tensor, product(x, weight, **options, config=tile))
    return _finish(functools.partial(product, norm=norm, eps=eps, config=tile), x, weight, bias, residual, gate_block)


def _has_gpu_kernel(weight: QuantisedWeight) -> bool:
    """Return whether GPU kernels read this weight: 8 bits with a scale a row, int4 in symmetric groups of `GROUP`."""
    if weight.kind != "int4":
        return weight.scales.shape[1] == 1
    return weight.zeros is None and weight.group == GROUP


def _finish(
    product: Any, x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor | None, gate_block: int
) -> Tensor:
    """Return silu(gate) * up of a product if `gate_block`, plus the residual."""
    if not gate_block and residual is not None and bias is None and product is F.linear:
        return torch.addmm(residual, x, weight.t())
    out: Tensor = product(x, weight, bias=bias)
    if gate_block:
        out = fastest_kernel("gated_mlp", x.device).forward(out, gate_block)
    return out if residual is None else out + residual
