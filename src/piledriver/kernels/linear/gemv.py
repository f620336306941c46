# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""A linear layer of a single row (batch 1) as a GPU kernel: bound by reading the weight, so no matrix instructions.

A program multiplies a few rows of the weight with the whole input, in one batch of loads. The RMS norm of the input is
computed by every program again: the input is tiny. Integer weights become floats by setting bits: 0x43000000 | n << 16
is 128 + n in fp32, 0x4B000000 | n is 2^23 + n.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piledriver.kernels.linear.weights import GROUP, QuantisedWeight

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_KINDS = {"plain": 0, "int8": 1, "int4": 2, "fp8": 3}
_MOST_COLUMNS = 16384

if triton is not None:

    @triton.jit
    def _wide(w, KIND: tl.constexpr):
        """Return weights in fp32."""
        if KIND == 1:
            biased = (w.to(tl.int32) + 128) | 0x4B000000
            return biased.to(tl.float32, bitcast=True) - 8388736.0
        return w.to(tl.float32)

    @triton.jit
    def _input(x, norm, places, COLUMNS: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr):
        """Return inputs in fp32, times the weight of the norm; its factor is applied to the sums."""
        if EVEN:
            value = tl.load(x + places).to(tl.float32)
            if NORM:
                value = value * tl.load(norm + places).to(tl.float32)
        else:
            value = tl.load(x + places, mask=places < COLUMNS, other=0.0).to(tl.float32)
            if NORM:
                value = value * tl.load(norm + places, mask=places < COLUMNS, other=0.0).to(tl.float32)
        return value

    @triton.jit
    def _rows_times_input(
        x, norm, weight, scales, rows, weight_stride, scale_stride,
        COLUMNS: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
        HALF: tl.constexpr,
    ):  # fmt: skip
        base = weight + rows.to(tl.int64) * weight_stride
        even: tl.constexpr = COLUMNS % BK == 0
        if KIND == 2:
            groups: tl.constexpr = BK // (2 * HALF)
            total = tl.zeros([R], tl.float32)
            for start in tl.static_range(0, COLUMNS, BK):
                group = tl.arange(0, groups)
                within = tl.arange(0, HALF)
                places = start + group[:, None] * 2 * HALF + within[None, :]
                known = start // (2 * HALF) + group < COLUMNS // (2 * HALF)
                spots = base[:, None, None] + (start // 2 + group[:, None] * HALF + within[None, :])[None, :, :]
                if even:
                    packed = tl.load(spots).to(tl.int32)
                else:
                    packed = tl.load(spots, mask=known[None, :, None], other=0).to(tl.int32)
                low = _input(x, norm, places, COLUMNS, NORM, even)
                high = _input(x, norm, places + HALF, COLUMNS, NORM, even)
                first = (((packed & 15) << 16) | 0x43000000).to(tl.float32, bitcast=True)
                second = (((packed & 240) << 12) | 0x43000000).to(tl.float32, bitcast=True)
                part = tl.sum(first * low[None, :, :] + second * high[None, :, :], axis=2)
                # Numbers were read as 128 + n with n = value + 8.
                part = part - 136.0 * tl.sum(low + high, axis=1)[None, :]
                place = rows[:, None] * scale_stride + start // (2 * HALF) + group[None, :]
                scale = tl.load(scales + place, mask=known[None, :], other=0.0).to(tl.float32)
                total += tl.sum(part * scale, axis=1)
            return total
        else:
            sums = tl.zeros([R, BK], tl.float32)
            for start in tl.static_range(0, COLUMNS, BK):
                places = start + tl.arange(0, BK)
                if even:
                    w = tl.load(base[:, None] + places[None, :])
                else:
                    w = tl.load(base[:, None] + places[None, :], mask=(places < COLUMNS)[None, :], other=0.0)
                sums += _wide(w, KIND) * _input(x, norm, places, COLUMNS, NORM, even)[None, :]
            total = tl.sum(sums, axis=1)
            if KIND > 0:
                total = total * tl.load(scales + rows).to(tl.float32)
            return total

    @triton.jit
    def _gemv(
        x, norm, weight, scales, bias, residual, out, outputs, eps, weight_stride, scale_stride,
        COLUMNS: tl.constexpr, PADDED: tl.constexpr, KIND: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
        RESIDUAL: tl.constexpr, NORM: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr,
    ):  # fmt: skip
        index = tl.program_id(0) * R + tl.arange(0, R)
        live = index < outputs
        index = tl.where(live, index, 0)
        rows = index
        if GATE > 0:
            rows = (index // GATE) * 2 * GATE + index % GATE
        if NORM:
            places = tl.arange(0, PADDED)
            whole = tl.load(x + places, mask=places < COLUMNS, other=0.0).to(tl.float32)
            factor = tl.rsqrt(tl.sum(whole * whole, axis=0) / COLUMNS + eps)
        total = _rows_times_input(
            x, norm, weight, scales, rows, weight_stride, scale_stride, COLUMNS, KIND, NORM, R, BK, HALF
        )
        if NORM:
            total = total * factor
        if BIAS:
            total += tl.load(bias + rows).to(tl.float32)
        if GATE > 0:
            other = _rows_times_input(
                x, norm, weight, scales, rows + GATE, weight_stride, scale_stride, COLUMNS, KIND, NORM, R, BK,
                HALF,
            )  # fmt: skip
            if NORM:
                other = other * factor
            if BIAS:
                other += tl.load(bias + rows + GATE).to(tl.float32)
            total = total / (1.0 + tl.exp(-total)) * other
        if RESIDUAL:
            total += tl.load(residual + index).to(tl.float32)
        tl.store(out + index, total.to(out.dtype.element_ty), mask=live)


def gemv(
    x: Tensor,
    weight: Tensor | QuantisedWeight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate_block: int = 0,
    norm: Tensor | None = None,
    eps: float = 0.0,
    config: dict[str, int] | None = None,
) -> Tensor:
    """Return the linear layer of [1, columns], after an RMS norm of the input where `norm` is its weight."""
    columns = x.shape[1]
    kind = weight.kind if isinstance(weight, QuantisedWeight) else "plain"
    data = weight.data if isinstance(weight, QuantisedWeight) else weight
    scales: Any = weight.scales if isinstance(weight, QuantisedWeight) else data
    outputs = data.shape[0] // 2 if gate_block else data.shape[0]
    chosen = config or _shape(kind, columns)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    _gemv[(triton.cdiv(outputs, chosen["rows"]),)](
        x, x if norm is None else norm, data, scales, data if bias is None else bias,
        x if residual is None else residual, out, outputs, eps, data.stride(0), scales.stride(0),
        COLUMNS=columns, PADDED=triton.next_power_of_2(columns), KIND=_KINDS[kind], GATE=gate_block,
        BIAS=bias is not None, RESIDUAL=residual is not None, NORM=norm is not None, R=chosen["rows"],
        BK=chosen["bk"], HALF=GROUP // 2, num_warps=chosen["warps"],
    )  # fmt: skip
    return out


def fits_gemv(x: Tensor) -> bool:
    """Return whether the kernel takes this input: one row, not too long for one batch of loads."""
    return len(x) == 1 and x.shape[1] <= _MOST_COLUMNS


def _shape(kind: str, columns: int) -> dict[str, int]:
    rows, warps = (4, 8) if kind == "plain" else (8, 4)
    return {"rows": rows, "bk": min(2048, max(2 * GROUP, triton.next_power_of_2(columns))), "warps": warps}
