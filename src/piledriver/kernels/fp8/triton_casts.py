# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
"""The casts to fp8 as GPU kernels: an amax, then one pass that writes the rows and the columns both.

The matrix units of Hopper take both operands along the summed dimension, so a matrix that is multiplied from both sides
is needed twice. Largest magnitudes are written per program and reduced by whoever reads them: no zeroing, no atomics.
The gated MLP computes its activation inside the casts: neither it nor its gradient exists in 16 bits.

Divisions are rounded to nearest (`div_rn`), not the fast ones: of numbers that came in bf16 many lie exactly between
two fp8 numbers, and one unit in the last place of the factor would send all of them the other way. Casts saturate, and
leave what is not a number that.

Columns are turned as words of four rows each, which the instruction packs by itself: Triton 3.6 turns bytes wrongly,
and of bytes that are shifted together ptxas 12.9 takes some from the stack pointer.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_PROGRAMS = 1024
_AMAX_BLOCK = 4096
_ROW_BLOCK = 4096

if triton is not None:

    @triton.jit
    def _amax_kernel(x, partial, size, programs: tl.constexpr, block: tl.constexpr):
        lanes = tl.arange(0, block)
        largest = tl.zeros((block,), tl.float32)
        for begin in range(tl.program_id(0).to(tl.int64) * block, size, programs * block):
            here = begin + lanes
            value = tl.load(x + here, mask=here < size, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        tl.store(partial + tl.program_id(0), tl.max(largest, axis=0))

    @triton.jit
    def _factor(partial, scale, limit, programs: tl.constexpr):
        """What to multiply by; the first program notes what to multiply by on the way back."""
        largest = tl.maximum(tl.max(tl.load(partial + tl.arange(0, programs)), axis=0), 1e-12)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale, tl.div_rn(largest, limit))
        return tl.div_rn(limit, largest)

    _TO_E4M3 = tl.constexpr("""{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
    }""")
    _TO_E5M2 = tl.constexpr(_TO_E4M3.value.replace("e4m3", "e5m2"))

    @triton.jit
    def _word(a, b, c, d, dtype: tl.constexpr):
        """Four rows of numbers as one row of words."""
        asm: tl.constexpr = _TO_E4M3 if dtype == tl.float8e4nv else _TO_E5M2
        return tl.inline_asm_elementwise(asm, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def _store_turned(out, packed, four, place, rows, inside):
        """Words of four rows each become runs along the columns."""
        there = place[:, None] * (rows // 4) + four[None, :]
        tl.store(out + there, tl.trans(packed), mask=inside[:, None] & (four[None, :] < rows // 4))

    @triton.jit
    def _cast_row(x, out, row, column, rows, columns, factor, dtype: tl.constexpr):
        """Some rows of a tile into their place; what they are before the cast."""
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        here = row[:, None] * columns + column[None, :]
        value = tl.load(x + here, mask=inside, other=0.0).to(tl.float32) * factor
        tl.store(out + here, value.to(dtype), mask=inside)
        return value

    @triton.jit
    def _cast_kernel(
        x,
        partial,
        scale,
        rows_out,
        columns_out,
        rows,
        columns,
        limit,
        dtype: tl.constexpr,
        want_columns: tl.constexpr,
        programs: tl.constexpr,
        tall: tl.constexpr,
        wide: tl.constexpr,
    ):
        factor = _factor(partial, scale, limit, programs)
        four = tl.program_id(0).to(tl.int64) * (tall // 4) + tl.arange(0, tall // 4)
        column = tl.program_id(1) * wide + tl.arange(0, wide)
        a = _cast_row(x, rows_out, four * 4, column, rows, columns, factor, dtype)
        b = _cast_row(x, rows_out, four * 4 + 1, column, rows, columns, factor, dtype)
        c = _cast_row(x, rows_out, four * 4 + 2, column, rows, columns, factor, dtype)
        d = _cast_row(x, rows_out, four * 4 + 3, column, rows, columns, factor, dtype)
        if want_columns:
            packed = _word(a, b, c, d, dtype)
            _store_turned(columns_out, packed, four, column.to(tl.int64), rows, column < columns)

    @triton.jit
    def _row_kernel(x, out, scale, columns, limit, dtype: tl.constexpr, block: tl.constexpr):
        """One program per row: its own amax, then its cast, the second read from cache."""
        row = tl.program_id(0).to(tl.int64)
        lanes = tl.arange(0, block)
        largest = tl.zeros((block,), tl.float32)
        for begin in range(0, columns, block):
            inside = begin + lanes < columns
            value = tl.load(x + row * columns + begin + lanes, mask=inside, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
        most = tl.maximum(tl.max(largest, axis=0), 1e-12)
        tl.store(scale + row, tl.div_rn(most, limit))
        factor = tl.div_rn(limit, most)
        for begin in range(0, columns, block):
            inside = begin + lanes < columns
            value = tl.load(x + row * columns + begin + lanes, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + row * columns + begin + lanes, (value * factor).to(dtype), mask=inside)

    @triton.jit
    def _gate_and_up(gate_up, row, column, inside, width, group: tl.constexpr):
        """Both halves of some columns; they alternate in groups."""
        place = row * 2 * width + (column // group) * 2 * group + column % group
        gate = tl.load(gate_up + place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + place + group, mask=inside, other=0.0).to(tl.float32)
        return gate, up, place

    @triton.jit
    def _gate_amax_kernel(
        gate_up, partial, rows, width, group: tl.constexpr, programs: tl.constexpr, block: tl.constexpr
    ):
        lanes = tl.arange(0, block)
        largest = tl.zeros((block,), tl.float32)
        parts = tl.cdiv(width, block)
        for number in range(tl.program_id(0), rows * parts, programs):
            row, column = (number // parts).to(tl.int64), (number % parts) * block + lanes
            gate, up, _ = _gate_and_up(gate_up, row, column, column < width, width, group)
            largest = tl.maximum(largest, tl.abs(gate * tl.sigmoid(gate) * up))
        tl.store(partial + tl.program_id(0), tl.max(largest, axis=0))

    @triton.jit
    def _gate_cast_kernel(
        gate_up,
        partial,
        scale,
        out,
        width,
        limit,
        dtype: tl.constexpr,
        group: tl.constexpr,
        programs: tl.constexpr,
        block: tl.constexpr,
    ):
        factor = _factor(partial, scale, limit, programs)
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        inside = column < width
        gate, up, _ = _gate_and_up(gate_up, row, column, inside, width, group)
        tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up * factor).to(dtype), mask=inside)

    @triton.jit
    def _gate_gradients(gate, up, gradient):
        """By gate, by up, and the activation itself."""
        sigmoid = tl.sigmoid(gate)
        swish = gate * sigmoid
        return gradient * up * (sigmoid + swish * (1.0 - sigmoid)), gradient * swish, swish * up

    @triton.jit
    def _gate_back_amax_kernel(
        gate_up, gradient, partial, rows, width, group: tl.constexpr, programs: tl.constexpr, block: tl.constexpr
    ):
        lanes = tl.arange(0, block)
        largest = tl.zeros((block,), tl.float32)
        parts = tl.cdiv(width, block)
        for number in range(tl.program_id(0), rows * parts, programs):
            row, column = (number // parts).to(tl.int64), (number % parts) * block + lanes
            inside = column < width
            gate, up, _ = _gate_and_up(gate_up, row, column, inside, width, group)
            slope = tl.load(gradient + row * width + column, mask=inside, other=0.0).to(tl.float32)
            by_gate, by_up, _ = _gate_gradients(gate, up, slope)
            largest = tl.maximum(largest, tl.maximum(tl.abs(by_gate), tl.abs(by_up)))
        tl.store(partial + tl.program_id(0), tl.max(largest, axis=0))

    @triton.jit
    def _gate_back_row(
        gate_up, gradient, out, row, column, rows, width, factor, dtype: tl.constexpr, group: tl.constexpr
    ):
        """Some rows of the gradient into their place; the gradients before the cast, and the activation."""
        inside = (row[:, None] < rows) & (column[None, :] < width)
        gate, up, place = _gate_and_up(gate_up, row[:, None], column[None, :], inside, width, group)
        slope = tl.load(gradient + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        by_gate, by_up, value = _gate_gradients(gate, up, slope)
        by_gate, by_up = by_gate * factor, by_up * factor
        tl.store(out + place, by_gate.to(dtype), mask=inside)
        tl.store(out + place + group, by_up.to(dtype), mask=inside)
        return by_gate, by_up, value

    @triton.jit
    def _gate_back_cast_kernel(
        gate_up,
        gradient,
        partial,
        scale,
        value_scale,
        rows_out,
        columns_out,
        value_columns_out,
        rows,
        width,
        limit,
        dtype: tl.constexpr,
        value_dtype: tl.constexpr,
        group: tl.constexpr,
        programs: tl.constexpr,
        tall: tl.constexpr,
        wide: tl.constexpr,
    ):
        """The gradient as rows and columns, and the activation again as columns, at the scale it had."""
        factor = _factor(partial, scale, limit, programs)
        back = tl.div_rn(1.0, tl.load(value_scale))
        four = tl.program_id(0).to(tl.int64) * (tall // 4) + tl.arange(0, tall // 4)
        column = tl.program_id(1) * wide + tl.arange(0, wide)
        first = four * 4
        g0, u0, v0 = _gate_back_row(gate_up, gradient, rows_out, first, column, rows, width, factor, dtype, group)
        g1, u1, v1 = _gate_back_row(gate_up, gradient, rows_out, first + 1, column, rows, width, factor, dtype, group)
        g2, u2, v2 = _gate_back_row(gate_up, gradient, rows_out, first + 2, column, rows, width, factor, dtype, group)
        g3, u3, v3 = _gate_back_row(gate_up, gradient, rows_out, first + 3, column, rows, width, factor, dtype, group)
        long = column.to(tl.int64)
        there = (long // group) * 2 * group + long % group
        _store_turned(columns_out, _word(g0, g1, g2, g3, dtype), four, there, rows, column < width)
        _store_turned(columns_out, _word(u0, u1, u2, u3, dtype), four, there + group, rows, column < width)
        value = _word(v0 * back, v1 * back, v2 * back, v3 * back, value_dtype)
        _store_turned(value_columns_out, value, four, long, rows, column < width)

    _TRITON = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def available() -> bool:
    """Whether the kernels can be built here."""
    return triton is not None


def _amax(x: Tensor) -> Tensor:
    partial = torch.empty(_PROGRAMS, dtype=torch.float32, device=x.device)
    _amax_kernel[(_PROGRAMS,)](x, partial, x.numel(), programs=_PROGRAMS, block=_AMAX_BLOCK, num_warps=8)
    return partial


def cast(x: Tensor, dtype: torch.dtype, columns: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, columns] to fp8, the same turned over ([columns, rows], or empty), and the scale of the way back.

    Rows come in fours.
    """
    partial, scale = _amax(x), torch.empty(1, dtype=torch.float32, device=x.device)
    height, width = x.shape
    rows_out = torch.empty_like(x, dtype=dtype)
    columns_out = x.new_empty((width, height) if columns else (0,), dtype=dtype)
    _cast_kernel[(triton.cdiv(height, 128), triton.cdiv(width, 128))](
        x,
        partial,
        scale,
        rows_out,
        columns_out.view(torch.int32),
        height,
        width,
        torch.finfo(dtype).max,
        dtype=_TRITON[dtype],
        want_columns=columns,
        programs=_PROGRAMS,
        tall=128,
        wide=128,
        num_warps=8,
    )
    return rows_out, columns_out, scale


def cast_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """To fp8 with a scale per row: [rows, 1]."""
    out, scale = torch.empty_like(x, dtype=dtype), torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    block = min(triton.next_power_of_2(x.shape[1]), _ROW_BLOCK)
    _row_kernel[(x.shape[0],)](
        x, out, scale, x.shape[1], torch.finfo(dtype).max, dtype=_TRITON[dtype], block=block, num_warps=8
    )
    return out, scale


def gate(gate_up: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in fp8, and its scale."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    partial = torch.empty(_PROGRAMS, dtype=torch.float32, device=gate_up.device)
    scale = torch.empty(1, dtype=torch.float32, device=gate_up.device)
    out = gate_up.new_empty((rows, width), dtype=dtype)
    _gate_amax_kernel[(_PROGRAMS,)](
        gate_up, partial, rows, width, group=group, programs=_PROGRAMS, block=2048, num_warps=8
    )
    _gate_cast_kernel[(rows, triton.cdiv(width, 2048))](
        gate_up,
        partial,
        scale,
        out,
        width,
        torch.finfo(dtype).max,
        dtype=_TRITON[dtype],
        group=group,
        programs=_PROGRAMS,
        block=2048,
        num_warps=8,
    )
    return out, scale


def gate_backward(
    gate_up: Tensor, gradient: Tensor, value_scale: Tensor, group: int, dtype: torch.dtype, value_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient by `gate_up` as rows and as columns, its scale, and the activation as columns."""
    rows, width = gradient.shape
    partial = torch.empty(_PROGRAMS, dtype=torch.float32, device=gate_up.device)
    scale = torch.empty(1, dtype=torch.float32, device=gate_up.device)
    rows_out = torch.empty_like(gate_up, dtype=dtype)
    columns_out = gate_up.new_empty((2 * width, rows), dtype=dtype)
    value_columns = gate_up.new_empty((width, rows), dtype=value_dtype)
    _gate_back_amax_kernel[(_PROGRAMS,)](
        gate_up, gradient, partial, rows, width, group=group, programs=_PROGRAMS, block=2048, num_warps=8
    )
    _gate_back_cast_kernel[(triton.cdiv(rows, 64), triton.cdiv(width, 64))](
        gate_up,
        gradient,
        partial,
        scale,
        value_scale,
        rows_out,
        columns_out.view(torch.int32),
        value_columns.view(torch.int32),
        rows,
        width,
        torch.finfo(dtype).max,
        dtype=_TRITON[dtype],
        value_dtype=_TRITON[value_dtype],
        group=group,
        programs=_PROGRAMS,
        tall=64,
        wide=64,
        num_warps=4,
    )
    return rows_out, columns_out, scale, value_columns
