# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Linear layers with int8 or int4 weights as one GPU kernel of integer matrix instructions.

Rows of the input are pairs of byte rows (`split`), so one product of integers serves both bytes of an element. The
weight is the left operand (out.T = weight @ x.T): the same instructions run for one row and for thousands. int4 values
are multiplied by 16, so that a mask and a sign bit make bytes of nibbles. Integer sums are exact. The columns are
divided into parts whose sums are added in order, by the last program to finish if several share a tile, so a row of the
result does not depend on how many there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options, prefetched, starts_early
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.integers.split import split_rows
from piledriver.kernels.linear.workspace import workspace
from piledriver.kernels.quantised_weight import GROUP, QuantisedWeight

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    triton = None

_UNIT = 256
"""Columns of int8 of which parts are multiples, whatever the tile."""

if triton is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait, prefetch
    from piledriver.kernels.linear.products import tile_of
    from piledriver.kernels.linear.workspace import add_parts

    @triton.jit
    def _nibbles(packed, ASM: tl.constexpr):
        """Return 16 times the values of the low and of the high four bits of bytes, as int8."""
        if ASM:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 t;
                shl.b32 t, $2, 4;
                lop3.b32 $0, t, 0xF0F0F0F0, 0x80808080, 0x6A;
                lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A;
                }""",
                "=&r,=r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            return ((packed << 4) ^ 0x80).to(tl.int8, bitcast=True), ((packed & 0xF0) ^ 0x80).to(tl.int8, bitcast=True)

    @triton.jit
    def _halves(both, BN: tl.constexpr, BM: tl.constexpr):
        """Return the sums with high and with low bytes, [BN, BM] each, of those with alternating rows of bytes."""
        return tl.split(tl.reshape(both, [BN, BM, 2]))

    @triton.jit
    def _tile(x, weight, w_rows, scales, rows, tile, column, begin, end, columns, scale_stride, INT4: tl.constexpr,
              DESCRIBED: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
              HALF: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
        """Return [BN, BM]: rows of the weight times tokens, over columns `begin` to `end`."""
        if not DESCRIBED:
            x_rows = x + (column * (2 * BM) + tl.arange(0, 2 * BM)).to(tl.int64)[:, None] * columns
        total = tl.zeros([BN, BM], tl.float32)
        if INT4:
            half = tl.arange(0, HALF)
            place = scales + rows * scale_stride
            scale = tl.load(place + begin // (2 * HALF))
            for k in range(begin, end, 2 * HALF):
                # The last of these is not used; it reads the group before.
                following = tl.minimum(k + 2 * HALF, end - 2 * HALF) // (2 * HALF)
                next_scale = tl.load(place + following)
                if DESCRIBED:
                    packed = weight.load([tile * BN, k // 2])
                    a = x.load([column * (2 * BM), k])
                    b = x.load([column * (2 * BM), k + HALF])
                else:
                    packed = tl.load(w_rows + (k // 2 + half)[None, :])
                    a = tl.load(x_rows + (k + half)[None, :])
                    b = tl.load(x_rows + (k + HALF + half)[None, :])
                first, second = _nibbles(packed, ASM)
                both = tl.dot(first, tl.trans(a), out_dtype=tl.int32)
                both = tl.dot(second, tl.trans(b), both, out_dtype=tl.int32)
                upper, lower = _halves(both, BN, BM)
                part = (upper * 256 + lower).to(tl.float32)
                total = tl.fma(part, tl.broadcast_to(scale.to(tl.float32)[:, None], part.shape), total)
                scale = next_scale
        else:
            offsets = tl.arange(0, BK)
            both = tl.zeros([BN, 2 * BM], tl.int32)
            for k in range(begin, end, BK):
                if DESCRIBED:
                    w = weight.load([tile * BN, k])
                    y = x.load([column * (2 * BM), k])
                elif EVEN:
                    w = tl.load(w_rows + (k + offsets)[None, :])
                    y = tl.load(x_rows + (k + offsets)[None, :])
                else:
                    inside = (k + offsets < columns)[None, :]
                    w = tl.load(w_rows + (k + offsets)[None, :], mask=inside, other=0)
                    y = tl.load(x_rows + (k + offsets)[None, :], mask=inside, other=0)
                both = tl.dot(w, tl.trans(y), both, out_dtype=tl.int32)
            upper, lower = _halves(both, BN, BM)
            total = tl.fma(upper.to(tl.float32), tl.full([BN, BM], 256.0, tl.float32), lower.to(tl.float32))
        return total

    @triton.jit(do_not_specialize=["tokens_count", "parts", "tiles", "across"])
    def _integer_tiles(
        x, x_scales, weight, described, scales, bias, residual, out, partial, counters, outputs, tokens_count, columns,
        part, parts, tiles, across, weight_stride, scale_stride, out_stride, residual_stride,
        INT4: tl.constexpr, DESCRIBED: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
        SHARED: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
        BK: tl.constexpr, HALF: tl.constexpr, TOGETHER: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
        AHEAD: tl.constexpr,
    ):  # fmt: skip
        if EARLY:
            gdc_launch_dependents()
        tile, column = tile_of(tl.program_id(0), tiles, across, TOGETHER)
        index = tile * BN + tl.arange(0, BN)
        tokens = column * BM + tl.arange(0, BM)
        # Rows beyond the last read the last, and are not stored.
        rows = tl.minimum(index, outputs - 1)
        if GATE > 0:
            rows = (rows // GATE) * 2 * GATE + rows % GATE
        w_rows = weight + rows.to(tl.int64)[:, None] * weight_stride
        begin = tl.program_id(1) * part if SHARED else 0
        end = tl.minimum(begin + part, columns)
        if AHEAD > 0:
            ahead = w_rows + (begin // 2 if INT4 else begin)
            prefetch(ahead, AHEAD, 128)
            if GATE > 0:
                prefetch(ahead + GATE * weight_stride, AHEAD, 128)
        if EARLY:
            gdc_wait()
        total = tl.zeros([BN, BM], tl.float32)
        other = tl.zeros([BN, BM], tl.float32)
        done = True
        if WHOLE or SHARED:
            total = _tile(x, described, w_rows, scales, rows, tile, column, begin, end, columns, scale_stride,
                          INT4, DESCRIBED, EVEN, BN, BM, BK, HALF, ASM)  # fmt: skip
        if SHARED:
            slot = tile * across + column
            size: tl.constexpr = BN * BM * (2 if GATE > 0 else 1)
            base = partial + slot.to(tl.int64) * parts * size
            within = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
            mine = base + tl.program_id(1) * size
            tl.store(mine + within, total)
            if GATE > 0:
                other = _tile(x, described, w_rows + GATE * weight_stride, scales, rows + GATE, tile, column, begin,
                              end, columns, scale_stride, INT4, False, EVEN, BN, BM, BK, HALF, ASM)  # fmt: skip
                tl.store(mine + BN * BM + within, other)
            tl.debug_barrier()
            before = tl.atomic_add(counters + slot, 1, sem="acq_rel")
            done = before == parts - 1
            if done:
                tl.debug_barrier()
                total = add_parts(base + within, size, parts)
                if GATE > 0:
                    other = add_parts(base + BN * BM + within, size, parts)
                tl.store(counters + slot, 0)
        elif WHOLE:
            if GATE > 0:
                other = _tile(x, described, w_rows + GATE * weight_stride, scales, rows + GATE, tile, column, begin,
                              end, columns, scale_stride, INT4, False, EVEN, BN, BM, BK, HALF, ASM)  # fmt: skip
        else:
            for p in range(parts):
                begin = p * part
                end = tl.minimum(begin + part, columns)
                total += _tile(x, described, w_rows, scales, rows, tile, column, begin, end, columns, scale_stride,
                               INT4, DESCRIBED, EVEN, BN, BM, BK, HALF, ASM)  # fmt: skip
                if GATE > 0:
                    other += _tile(x, described, w_rows + GATE * weight_stride, scales, rows + GATE, tile, column,
                                   begin, end, columns, scale_stride, INT4, False, EVEN, BN, BM, BK, HALF,
                                   ASM)  # fmt: skip
        if done:
            token_scale = tl.load(x_scales + tokens)[None, :]
            total = total * token_scale
            other = other * token_scale
            if not INT4:
                total = total * tl.load(scales + rows).to(tl.float32)[:, None]
                if GATE > 0:
                    other = other * tl.load(scales + rows + GATE).to(tl.float32)[:, None]
            if BIAS:
                total = total + tl.load(bias + rows).to(tl.float32)[:, None]
                if GATE > 0:
                    other = other + tl.load(bias + rows + GATE).to(tl.float32)[:, None]
            if GATE > 0:
                total = total / (1.0 + tl.exp(-total)) * other
            inside = (index < outputs)[:, None] & (tokens < tokens_count)[None, :]
            if RESIDUAL:
                place = residual + tokens.to(tl.int64)[None, :] * residual_stride + index[:, None]
                total = total + tl.load(place, mask=inside, other=0.0).to(tl.float32)
            place = out + tokens.to(tl.int64)[None, :] * out_stride + index[:, None]
            tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def integer_tiles(
    x: Tensor,
    weight: QuantisedWeight,
    fused: Fused = PRODUCT_ONLY,
    *,
    invariant: bool = False,
    config: dict[str, int] | None = None,
) -> Tensor:
    """Return the linear layer of [rows, columns] with an int8 or int4 weight.

    With `invariant`, a row's bits do not depend on the number of rows.
    """
    norm, eps, bias, gate_block, residual = fused
    tokens, columns = x.shape
    data, scales, int4 = weight.data, weight.scales, weight.kind == "int4"
    outputs = data.shape[0] // 2 if gate_block else data.shape[0]
    gate = bool(gate_block)
    chosen = config or integer_tile_shape(tokens, outputs, columns, int4=int4, gate=gate, invariant=invariant)
    bn, bm, bk = chosen["bn"], chosen["bm"], chosen["bk"]
    unit = GROUP if int4 else _UNIT
    part = triton.cdiv(triton.cdiv(columns, chosen["parts"]), unit) * unit
    parts = triton.cdiv(columns, part)
    tiles, across = triton.cdiv(outputs, bn), triton.cdiv(tokens, bm)
    shared = parts > 1 and across <= chosen.get("share", 4)
    early = starts_early(x.device)
    shortest = (columns - (parts - 1) * part if shared else columns) // (2 if int4 else 1)
    rows, x_scales = split_rows(x, norm, eps, padded=across * bm, divisor=16.0 if int4 else 1.0)
    count = tiles * across * parts * bn * bm * (2 if gate_block else 1) if shared else 1
    partial, counters = workspace(x.device, count, tiles * across)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    described = early and not gate and columns % 16 == 0
    box = GROUP // 2 if int4 else bk
    _integer_tiles[(tiles * across, parts if shared else 1)](
        TensorDescriptor.from_tensor(rows, [2 * bm, box]) if described else rows, x_scales, data,
        TensorDescriptor.from_tensor(data, [bn, box]) if described else data, scales, x if bias is None else bias,
        x if residual is None else residual, out, partial, counters, outputs, tokens, columns, part, parts, tiles,
        across, data.stride(0), scales.stride(0), out.stride(0), 0 if residual is None else residual.stride(0),
        INT4=int4, DESCRIBED=described, GATE=gate_block, BIAS=bias is not None, RESIDUAL=residual is not None,
        SHARED=shared, WHOLE=parts == 1, EVEN=columns % bk == 0 and part % bk == 0, BN=bn, BM=bm, BK=bk,
        HALF=GROUP // 2, TOGETHER=chosen.get("together", 8),
        ASM=isinstance(_integer_tiles, triton.runtime.JITFunction), EARLY=early,
        AHEAD=prefetched(chosen.get("ahead", 0), shortest, 128) if early and across == 1 else 0,
        num_warps=chosen["warps"], num_stages=chosen["stages"], **launch_options(early),
    )  # fmt: skip
    return out


def integer_tile_shape(
    tokens: int, outputs: int, columns: int, *, int4: bool, gate: bool, invariant: bool
) -> dict[str, int]:
    """Return the tile for a number of tokens.

    With `invariant`, `parts`, the division of the columns, depends on the weight alone. The size of a tile changes no
    bit: int4 is summed group after group, int8 exactly.
    """
    bm = min(64, max(8, triton.next_power_of_2(tokens)))
    shape = {"bn": 64, "bm": bm, "bk": 256 if bm <= 16 else 128, "warps": 4, "stages": 4, "ahead": 0}
    factor = 2 if gate else 1
    few = max(1, min(128 // (triton.cdiv(outputs, 64) * factor), 4, columns // 512))
    if not int4:
        return {**shape, "parts": few}
    tiles, small = triton.cdiv(outputs, 128) * factor, columns <= 2048
    few = max(1, min(128 // tiles, 8, columns // 256))
    many = max(1, min(512 // tiles, 4, columns // 256))
    shape |= {"bn": 128, "bk": 128, "stages": 3}
    if bm == 8:
        shape |= {"bn": 256, "warps": 8, "ahead": 1 << 20}
    elif bm == 32:
        shape |= {"stages": 4} if small else {"ahead": 1 << 20}
    elif bm == 64 and small and tokens <= 64:
        shape |= {"bn": 64, "stages": 4}
    elif bm == 64:
        shape |= {"warps": 8}
    if invariant:
        return {**shape, "parts": few}
    return {**shape, "parts": many if bm <= 32 else few if tokens <= 64 else 1}
