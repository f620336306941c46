# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
"""Casts to fp8 as GPU kernels: one pass finds the largest magnitude, a second writes rows and columns.

The matrix units of Hopper read both operands along the summed dimension, so a matrix that is multiplied from both sides
is stored twice. Largest magnitudes are stored per program and reduced by the kernel that reads them: no zeroing, no
atomics. The gated MLP computes its activation inside the casts: neither it nor its gradient is stored in 16 bits.

Divisions round to nearest (`div_rn`) instead of the fast ones: many bf16 numbers lie exactly between two fp8 numbers,
and one unit in the last place of the factor would move all of them to the other side. Casts saturate and keep NaNs.

Columns are transposed as words of four rows each, which one instruction packs: Triton 3.6 transposes bytes wrongly, and
when bytes are shifted together ptxas 12.9 takes some of them from the stack pointer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.fp8.reference import BACKWARD, FORWARD, ReferenceFp8
from piledriver.kernels.registry import TritonKernel
from piledriver.kernels.torch_private import scaled_mm

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
        """The factor of the cast; the first program stores the scale that undoes it."""
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
        """Pack four rows of numbers into one row of words."""
        asm: tl.constexpr = _TO_E4M3 if dtype == tl.float8e4nv else _TO_E5M2
        return tl.inline_asm_elementwise(asm, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)

    @triton.jit
    def _store_transposed(out, packed, four, place, rows, inside):
        """Store words of four rows each as runs along the columns."""
        there = place[:, None] * (rows // 4) + four[None, :]
        tl.store(out + there, tl.trans(packed), mask=inside[:, None] & (four[None, :] < rows // 4))

    @triton.jit
    def _cast_row(x, out, row, column, rows, columns, factor, dtype: tl.constexpr):
        """Cast some rows of a tile and store them; return them before the cast."""
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
            _store_transposed(columns_out, packed, four, column.to(tl.int64), rows, column < columns)

    @triton.jit
    def _row_kernel(x, out, scale, columns, limit, dtype: tl.constexpr, block: tl.constexpr):
        """One program per row: its largest magnitude, then its cast, whose reads come from cache."""
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
        """Load gate and up of some columns; they alternate in groups."""
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
        """The gradients of gate and up, and the activation."""
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
        """Cast some rows of the gradient and store them; return the gradients before the cast, and the activation."""
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
        """Store the gradient as rows and columns, and the activation as columns at its forward scale."""
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
        _store_transposed(columns_out, _word(g0, g1, g2, g3, dtype), four, there, rows, column < width)
        _store_transposed(columns_out, _word(u0, u1, u2, u3, dtype), four, there + group, rows, column < width)
        value = _word(v0 * back, v1 * back, v2 * back, v3 * back, value_dtype)
        _store_transposed(value_columns_out, value, four, long, rows, column < width)

    _TRITON = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def _amax(x: Tensor) -> Tensor:
    partial = torch.empty(_PROGRAMS, dtype=torch.float32, device=x.device)
    _amax_kernel[(_PROGRAMS,)](x, partial, x.numel(), programs=_PROGRAMS, block=_AMAX_BLOCK, num_warps=8)
    return partial


class TritonFp8(TritonKernel):
    """Casts as Triton kernels, products on the fp8 units of Hopper and later GPUs."""

    ops_to_save = ReferenceFp8.ops_to_save

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return whether the device has fp8 matrix units, and Triton is installed."""
        return super().runs_on(device) and torch.cuda.get_device_capability(device) >= (9, 0)

    def cast(self, x: Tensor, dtype: torch.dtype, *, columns: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return [rows, columns] in fp8, its transpose (empty if `columns` is false), and the one scale ([1]).

        The number of rows must be a multiple of four.
        """
        x = x.contiguous()
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

    def cast_rows(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return [rows, columns] in fp8 and a scale per row ([rows, 1])."""
        x = x.contiguous()
        out, scale = torch.empty_like(x, dtype=dtype), torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
        block = min(triton.next_power_of_2(x.shape[1]), _ROW_BLOCK)
        _row_kernel[(x.shape[0],)](
            x, out, scale, x.shape[1], torch.finfo(dtype).max, dtype=_TRITON[dtype], block=block, num_warps=8
        )
        return out, scale

    def product(
        self,
        left: Tensor,
        right: Tensor,
        left_scale: Tensor,
        right_scale: Tensor,
        out: torch.dtype,
        *,
        fast: bool = False,
    ) -> Tensor:
        """Return left @ right.T of fp8 rows, as `ReferenceFp8.product`."""
        other = right_scale if right_scale.numel() == 1 else right_scale.t()
        return scaled_mm(left, right.t(), left_scale, other, out, fast=fast)

    def gate(self, gate_up: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Return silu(gate) * up in fp8 and its scale; gate and up alternate in groups of columns."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        partial = torch.empty(_PROGRAMS, dtype=torch.float32, device=gate_up.device)
        scale = torch.empty(1, dtype=torch.float32, device=gate_up.device)
        out = gate_up.new_empty((rows, width), dtype=FORWARD)
        _gate_amax_kernel[(_PROGRAMS,)](
            gate_up, partial, rows, width, group=group, programs=_PROGRAMS, block=2048, num_warps=8
        )
        _gate_cast_kernel[(rows, triton.cdiv(width, 2048))](
            gate_up,
            partial,
            scale,
            out,
            width,
            torch.finfo(FORWARD).max,
            dtype=_TRITON[FORWARD],
            group=group,
            programs=_PROGRAMS,
            block=2048,
            num_warps=8,
        )
        return out, scale

    def gate_backward(
        self, gate_up: Tensor, gradient: Tensor, value_scale: Tensor, group: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradient of `gate_up` as rows and as columns, its scale, and the activation as columns."""
        gradient = gradient.contiguous()
        rows, width = gradient.shape
        partial = torch.empty(_PROGRAMS, dtype=torch.float32, device=gate_up.device)
        scale = torch.empty(1, dtype=torch.float32, device=gate_up.device)
        rows_out = torch.empty_like(gate_up, dtype=BACKWARD)
        columns_out = gate_up.new_empty((2 * width, rows), dtype=BACKWARD)
        value_columns = gate_up.new_empty((width, rows), dtype=FORWARD)
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
            torch.finfo(BACKWARD).max,
            dtype=_TRITON[BACKWARD],
            value_dtype=_TRITON[FORWARD],
            group=group,
            programs=_PROGRAMS,
            tall=64,
            wide=64,
            num_warps=4,
        )
        return rows_out, columns_out, scale, value_columns
