# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""A linear layer of a single row (batch 1) as a GPU kernel: bound by reading the weight, so no matrix instructions.

A warp multiplies whole rows of the weight with the input, so that sums cross lanes, not warps. Loads of the weight come
first in the program: the input, its RMS norm (computed by every program again: it is tiny) and the sums follow while
they are under way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options, starts_early
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.quantised_weight import QuantisedWeight

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_MOST_COLUMNS = 16384

if triton is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait

    @triton.jit
    def finish(total, other, rows, index, live, bias, residual, out, GATE: tl.constexpr, BIAS: tl.constexpr,
               RESIDUAL: tl.constexpr):  # fmt: skip
        """Apply the epilogue to sums of rows `rows` (and of `rows + GATE`) and store them."""
        if BIAS:
            total += tl.load(bias + rows).to(tl.float32)
            if GATE > 0:
                other += tl.load(bias + rows + GATE).to(tl.float32)
        if GATE > 0:
            total = total / (1.0 + tl.exp(-total)) * other
        if RESIDUAL:
            total += tl.load(residual + index).to(tl.float32)
        tl.store(out + index, total.to(out.dtype.element_ty), mask=live)

    @triton.jit
    def _gemv(
        x, norm, weight, scales, bias, residual, out, outputs, eps, weight_stride,
        COLUMNS: tl.constexpr, SCALED: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
        NORM: tl.constexpr, R: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        if EARLY:
            gdc_launch_dependents()
        index = tl.program_id(0) * R + tl.arange(0, R)
        live = index < outputs
        index = tl.where(live, index, 0)
        rows = index
        if GATE > 0:
            rows = (index // GATE) * 2 * GATE + index % GATE
        base = weight + rows.to(tl.int64)[:, None, None] * weight_stride
        even: tl.constexpr = COLUMNS % (CHUNKS * LANES) == 0
        total = tl.zeros([R, LANES], tl.float32)
        other = tl.zeros([R, LANES], tl.float32)
        squares = tl.zeros([CHUNKS, LANES], tl.float32)
        for start in tl.static_range(0, COLUMNS, CHUNKS * LANES):
            wide = start + tl.arange(0, CHUNKS)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]
            places = start + tl.arange(0, CHUNKS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
            if even:
                w = tl.load(base + wide)
                if GATE > 0:
                    v = tl.load(base + GATE * weight_stride + wide)
            else:
                w = tl.load(base + wide, mask=wide < COLUMNS, other=0.0)
                if GATE > 0:
                    v = tl.load(base + GATE * weight_stride + wide, mask=wide < COLUMNS, other=0.0)
            if EARLY and start == 0:
                gdc_wait()
            if even:
                value = tl.load(x + places).to(tl.float32)
            else:
                value = tl.load(x + places, mask=places < COLUMNS, other=0.0).to(tl.float32)
            if NORM:
                squares += value * value
                if even:
                    value = value * tl.load(norm + places).to(tl.float32)
                else:
                    value = value * tl.load(norm + places, mask=places < COLUMNS, other=0.0).to(tl.float32)
            total += tl.sum(w.to(tl.float32) * value[None, :, :], axis=1)
            if GATE > 0:
                other += tl.sum(v.to(tl.float32) * value[None, :, :], axis=1)
        sums = tl.sum(total, axis=1)
        more = tl.sum(other, axis=1)
        if NORM:
            factor = tl.rsqrt(tl.sum(squares) / COLUMNS + eps)
            sums, more = sums * factor, more * factor
        if SCALED:
            sums = sums * tl.load(scales + rows).to(tl.float32)
            if GATE > 0:
                more = more * tl.load(scales + rows + GATE).to(tl.float32)
        finish(sums, more, rows, index, live, bias, residual, out, GATE, BIAS, RESIDUAL)


def gemv(
    x: Tensor,
    weight: Tensor | QuantisedWeight,
    fused: Fused = PRODUCT_ONLY,
    *,
    config: dict[str, int] | None = None,
) -> Tensor:
    """Return the linear layer of [1, columns] with a 16-bit or fp8 weight."""
    norm, eps, bias, gate_block, residual = fused
    columns = x.shape[1]
    scaled = isinstance(weight, QuantisedWeight)
    data, scales = (weight.data, weight.scales) if isinstance(weight, QuantisedWeight) else (weight, weight)
    outputs = data.shape[0] // 2 if gate_block else data.shape[0]
    lanes = 512 if scaled else 256  # 16 bytes a lane
    chosen = config or gemv_shape(columns, lanes, gate=bool(gate_block))
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    early = starts_early(x.device)
    _gemv[(triton.cdiv(outputs, chosen["rows"]),)](
        x, x if norm is None else norm, data, scales, data if bias is None else bias,
        x if residual is None else residual, out, outputs, eps, data.stride(0),
        COLUMNS=columns, SCALED=scaled, GATE=gate_block, BIAS=bias is not None, RESIDUAL=residual is not None,
        NORM=norm is not None, R=chosen["rows"], CHUNKS=chosen["chunks"], LANES=lanes, EARLY=early,
        num_warps=chosen["warps"], **launch_options(early),
    )  # fmt: skip
    return out


def fits_gemv(x: Tensor, weight: Tensor | QuantisedWeight) -> bool:
    """Return whether the kernel takes this input and weight: one row of at most `_MOST_COLUMNS`, no integers."""
    integers = isinstance(weight, QuantisedWeight) and weight.kind != "fp8"
    return len(x) == 1 and x.shape[1] <= _MOST_COLUMNS and not integers


def gemv_shape(columns: int, lanes: int, *, gate: bool) -> dict[str, int]:
    """Return rows of a program, chunks of columns that are loaded at once, and warps."""
    chunks = min(8, triton.next_power_of_2(triton.cdiv(columns, lanes)))
    if gate or columns > 4096:
        return {"rows": 2, "chunks": chunks, "warps": 2}
    return {"rows": 4, "chunks": chunks, "warps": 4}
