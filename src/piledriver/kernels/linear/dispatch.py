"""Which linear kernel runs."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.linear.dequantise import dequantise_integers
from piledriver.kernels.linear.fused import Fused
from piledriver.kernels.linear.gemv import fits_gemv, gemv
from piledriver.kernels.linear.integers.gemv import fits_integer_gemv, integer_gemv
from piledriver.kernels.linear.integers.tiles import integer_tiles
from piledriver.kernels.linear.invariant_row import fits_invariant_row, invariant_row_linear
from piledriver.kernels.linear.mixed.pipelined_rows import fits_pipelined_rows, pipelined_rows
from piledriver.kernels.linear.mixed.resident_rows import fits_resident_rows, resident_rows
from piledriver.kernels.linear.mixed.rows import fits_mixed_rows, mixed_rows
from piledriver.kernels.linear.mixed.streamed_rows import fits_streamed_rows, streamed_rows
from piledriver.kernels.linear.mixed.tiles import fits_mixed, mixed
from piledriver.kernels.linear.mixed.warp_specialised import fits_warp_specialised, warp_specialised
from piledriver.kernels.linear.tuned import tuned_kernel
from piledriver.kernels.quantised_weight import GROUP, QuantisedWeight, dequantise_weight
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
    if x.is_cuda and isinstance(weight, QuantisedWeight) and not _has_gpu_kernel(weight):
        weight = dequantise_weight(weight, x.dtype)
    fused = Fused(norm, eps, bias, gate_block, residual)
    if x.is_cuda and HAS_TRITON and invariant and isinstance(weight, Tensor) and fits_invariant_row(x, weight):
        return invariant_row_linear(x, weight, fused)
    if x.is_cuda and HAS_TRITON and not invariant:
        if isinstance(weight, QuantisedWeight) and weight.kind != "fp8":
            return _integers(x, weight, fused)
        if fits_gemv(x, weight):
            return gemv(x, weight, fused)
        if len(x) > _MOST_ROWS:
            plain = dequantise_weight(weight, x.dtype) if isinstance(weight, QuantisedWeight) else weight
            return _dense(x, plain, fused)
    out: Tensor = fastest_kernel("linear", x.device)(x, weight, fused, invariant=invariant)
    return out


def _integers(x: Tensor, weight: QuantisedWeight, fused: Fused) -> Tensor:
    """Return the linear layer with an int8 or int4 weight, by the kernel that is fastest for this number of rows."""
    if fits_integer_gemv(x, weight, fused.norm):
        return integer_gemv(x, weight, fused)
    if fits_resident_rows(x, weight, fused.gate_block):
        return resident_rows(x, weight, fused)
    chosen = tuned_kernel(weight, len(x), specialised=fits_warp_specialised(x, weight, fused.residual))
    if chosen["kernel"] == "pipelined_rows" and fits_pipelined_rows(x, weight, fused.gate_block):
        return pipelined_rows(x, weight, fused)
    if chosen["kernel"] in ("rows", "pipelined_rows") and fits_mixed_rows(x, weight):
        return mixed_rows(x, weight, fused)
    if chosen["kernel"] == "streamed_rows" and fits_streamed_rows(x, weight, fused.gate_block):
        return streamed_rows(x, weight, fused)
    if fused.gate_block and len(x) <= _MOST_ROWS and (weight.kind == "int8" or chosen["kernel"] != "warp_specialised"):
        # It applies the gate itself. For int4, the warp-specialised kernel and then the gate's are faster.
        return integer_tiles(x, weight, fused)
    if chosen["kernel"] == "dequantised" or (chosen["kernel"] == "mixed" and not fits_mixed(x)):
        return _dense(x, dequantise_integers(weight, x.dtype), fused)
    tile = chosen if "stages" in chosen else None
    products: dict[str, Any] = {"mixed": mixed, "warp_specialised": warp_specialised}
    product = products.get(chosen["kernel"], integer_tiles)
    if not fused.gate_block:
        return cast(Tensor, product(x, weight, fused, config=tile))
    return _finish(product(x, weight, fused._replace(gate_block=0, residual=None), config=tile), fused)


def _dense(x: Tensor, weight: Tensor, fused: Fused) -> Tensor:
    """Return the linear layer with a plain weight, by torch's product."""
    rows = fused.normalised(x)
    if not fused.gate_block and fused.residual is not None and fused.bias is None:
        return torch.addmm(fused.residual, rows, weight.t())
    return _finish(F.linear(rows, weight, fused.bias), fused)


def _finish(out: Tensor, fused: Fused) -> Tensor:
    """Return silu(gate) * up of a product with its bias, if there is a gate, plus the residual."""
    if fused.gate_block:
        out = fastest_kernel("gated_mlp", out.device).forward(out, fused.gate_block)
    return out if fused.residual is None else out + fused.residual


def _has_gpu_kernel(weight: QuantisedWeight) -> bool:
    """Return whether GPU kernels read this weight: 8 bits with a scale a row, int4 in symmetric groups of `GROUP`."""
    if weight.kind != "int4":
        return weight.scales.shape[1] == 1
    return weight.zeros is None and weight.group == GROUP
