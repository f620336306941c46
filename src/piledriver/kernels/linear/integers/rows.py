# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Linear layers of a few rows with int8 or int4 weights as a GPU kernel: weights go from memory to matrix instructions.

Warps divide the columns, and a program loads all of its weights into registers before it waits for the input (rows of
bytes, see `split`). Four lanes hold 64 bytes of a row of the weight: with the columns taken in that order, loads of
16 bytes a lane are the operands of `mma.m16n8k32`, and no shared memory is needed. Eight rows of bytes are four rows of
the input. The order of sums depends on the weight alone, so a row of the result does not depend on how many there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options, starts_early
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.integers.split import split_rows
from piledriver.kernels.linear.weights import GROUP, QuantisedWeight

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_WORDS = 16
"""Words of four bytes that four lanes hold of a row."""

if triton is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.linear.integers.split import upper_nibbles

    @triton.jit
    def _mma(weight, x, total):
        """Return total plus products of two sets of eight rows, in the registers of two matrix instructions.

        Eight elements of a lane are four words of a row and four of the row eight below it. Words 0 and 1 are the
        operands of the first instruction, 2 and 3 those of the second. Results of the first are in elements 0, 1, 4
        and 5, for rows of bytes 2 * lane and 2 * lane + 1; those of the second in the others.
        """
        return tl.inline_asm_elementwise(
            """{
            mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
                {$0, $1, $4, $5}, {$8, $12, $9, $13}, {$16, $17}, {$24, $25, $28, $29};
            mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
                {$2, $3, $6, $7}, {$10, $14, $11, $15}, {$18, $19}, {$26, $27, $30, $31};
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r" + ",r" * 24,
            [weight, x, total], dtype=tl.int32, is_pure=True, pack=8,
        )  # fmt: skip

    @triton.jit
    def _bytes_product(weight, x):
        """Return [8, KS, REP, S, 8], sums over words of products of four signed bytes each: what `_mma` computes."""
        x = tl.permute(x, [1, 2, 3, 0, 4])
        total = tl.zeros([8, weight.shape[1], weight.shape[2], weight.shape[3], 8], tl.int32)
        for byte in tl.static_range(4):
            a = (weight << (24 - 8 * byte)) >> 24
            b = (x << (24 - 8 * byte)) >> 24
            total += tl.sum(a[:, :, :, :, None, :] * b[None, :, :, :, :, :], axis=5)
        return total

    @triton.jit
    def _pairs(first, second, x, more, S: tl.constexpr, REP: tl.constexpr, KS: tl.constexpr, INT4: tl.constexpr,
               ASM: tl.constexpr):  # fmt: skip
        """Return [8, KS, REP, S, 4, 2]: sums of rows of the weight with the high and low bytes of four tokens."""
        if ASM:
            total = _mma(first, x, tl.zeros([8, KS, REP, S, 16], tl.int32))
            if INT4:
                total = _mma(second, more, total)
            total = tl.sum(tl.reshape(total, [8, KS, REP, S, 4, 2, 2]), axis=5)
        else:
            total = _bytes_product(first, x)
            if INT4:
                total += _bytes_product(second, more)
            total = tl.reshape(total, [8, KS, REP, S, 4, 2])
        return total

    @triton.jit
    def _load_rows(weight, scales, rows, weight_stride, scale_stride, S: tl.constexpr, REP: tl.constexpr,
                   KS: tl.constexpr, INT4: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
        """Return two words of bytes for each word of the weight (the same for int8), and the scales of the groups."""
        step = tl.arange(0, S)[None, None, None, :, None] * KS + tl.arange(0, KS)[None, :, None, None, None]
        at = rows.to(tl.int64)[:, None, :, None, None]
        words = tl.load(weight + at * weight_stride + step * 16 + tl.arange(0, 16)[None, None, None, None, :])
        if INT4:
            scale = tl.load(scales + at * scale_stride + step).to(tl.float32)
            return upper_nibbles(words << 4, ASM), upper_nibbles(words, ASM), scale
        else:
            return words, words, tl.load(scales + rows)[:, None, :, None].to(tl.float32)

    @triton.jit
    def _sums(first, second, scale, x, more, S: tl.constexpr, REP: tl.constexpr, KS: tl.constexpr, INT4: tl.constexpr,
              ASM: tl.constexpr):  # fmt: skip
        """Return [8, REP, 4]: rows of the weight times four tokens."""
        upper, lower = tl.split(_pairs(first, second, x, more, S, REP, KS, INT4, ASM))
        if INT4:
            part = tl.sum((upper * 256 + lower).to(tl.float32) * scale, axis=3)
        else:
            upper, lower = tl.sum(upper, axis=3), tl.sum(lower, axis=3)
            part = (upper.to(tl.float32) * 256.0 + lower.to(tl.float32)) * scale
        return tl.sum(part, axis=1)

    @triton.jit(do_not_specialize=["tokens_count"])
    def _integer_rows(
        x, x_scales, weight, scales, bias, residual, out, outputs, tokens_count, x_stride, weight_stride, scale_stride,
        out_stride, residual_stride,
        INT4: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, S: tl.constexpr,
        REP: tl.constexpr, KS: tl.constexpr, FOURS: tl.constexpr, ASM: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        if EARLY:
            gdc_launch_dependents()
        index = tl.program_id(0) * (REP * 8) + tl.arange(0, 8)[:, None] + tl.arange(0, REP)[None, :] * 8
        # Rows beyond the last read the last, and are not stored.
        rows = tl.minimum(index, outputs - 1)
        if GATE > 0:
            rows = (rows // GATE) * 2 * GATE + rows % GATE
        first, second, scale = _load_rows(weight, scales, rows, weight_stride, scale_stride, S, REP, KS, INT4, ASM)
        if GATE > 0:
            up_first, up_second, up_scale = _load_rows(weight, scales, rows + GATE, weight_stride, scale_stride, S, REP,
                                                       KS, INT4, ASM)  # fmt: skip
        if EARLY:
            gdc_wait()
        step = tl.arange(0, S)[None, None, None, :, None] * KS + tl.arange(0, KS)[None, :, None, None, None]
        places = step * (32 if INT4 else 16) + tl.arange(0, 16)[None, None, None, None, :]
        for four in tl.static_range(FOURS):
            x_rows = x + (four * 8 + tl.arange(0, 8))[:, None, None, None, None] * x_stride + places
            near = tl.load(x_rows)
            more = tl.load(x_rows + 16) if INT4 else near
            tokens = four * 4 + tl.arange(0, 4)
            factor = tl.load(x_scales + tokens)[None, None, :]
            total = _sums(first, second, scale, near, more, S, REP, KS, INT4, ASM) * factor
            if BIAS:
                total += tl.load(bias + rows).to(tl.float32)[:, :, None]
            if GATE > 0:
                other = _sums(up_first, up_second, up_scale, near, more, S, REP, KS, INT4, ASM) * factor
                if BIAS:
                    other += tl.load(bias + rows + GATE).to(tl.float32)[:, :, None]
                total = total / (1.0 + tl.exp(-total)) * other
            inside = (index < outputs)[:, :, None] & (tokens < tokens_count)[None, None, :]
            if RESIDUAL:
                place = residual + tokens[None, None, :] * residual_stride + index[:, :, None]
                total += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            place = out + tokens[None, None, :] * out_stride + index[:, :, None]
            tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def integer_rows(
    x: Tensor,
    weight: QuantisedWeight,
    fused: Fused = PRODUCT_ONLY,
    *,
    config: dict[str, int] | None = None,
) -> Tensor:
    """Return the linear layer of [rows, columns] with an int8 or int4 weight."""
    norm, eps, bias, gate_block, residual = fused
    tokens, columns = x.shape
    data, scales, int4 = weight.data.view(torch.int32), weight.scales, weight.kind == "int4"
    outputs = data.shape[0] // 2 if gate_block else data.shape[0]
    chosen = config or rows_shape(columns, int4=int4)
    fours = triton.cdiv(tokens, 4)
    rows, x_scales = split_rows(x, norm, eps, padded=4 * fours, divisor=16.0 if int4 else 1.0)
    words = rows.view(torch.int32)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    early = starts_early(x.device)
    _integer_rows[(triton.cdiv(outputs, 8 * chosen["rep"]),)](
        words, x_scales, data, scales, x if bias is None else bias, x if residual is None else residual, out, outputs,
        tokens, words.stride(0), data.stride(0), scales.stride(0), out.stride(0),
        0 if residual is None else residual.stride(0),
        INT4=int4, GATE=gate_block, BIAS=bias is not None, RESIDUAL=residual is not None,
        S=data.shape[1] // (_WORDS * chosen["warps"]), REP=chosen["rep"], KS=chosen["warps"], FOURS=fours,
        ASM=isinstance(_integer_rows, triton.runtime.JITFunction), EARLY=early, num_warps=chosen["warps"],
        **launch_options(early),
    )  # fmt: skip
    return out


def fits_integer_rows(x: Tensor, weight: QuantisedWeight) -> bool:
    """Return whether the kernel takes this input: at most 16 rows of bf16, columns in a power of two of steps."""
    if weight.kind == "fp8" or len(x) > 16 or x.dtype != torch.bfloat16:
        return False
    steps = weight.data.shape[1] // (4 * _WORDS)
    return weight.data.shape[1] % (4 * _WORDS) == 0 and 4 <= steps <= 128 and steps & (steps - 1) == 0


def most_rows(weight: QuantisedWeight, *, gate: bool) -> int:
    """Return up to how many rows of the input this kernel is the fastest; with a gate, registers allow for fewer."""
    small = weight.shape[1] <= 2048
    if weight.kind == "int8":
        return 4 if small else 0
    return (8 if gate else 16) if small else 4


def rows_shape(columns: int, *, int4: bool) -> dict[str, int]:
    """Return sets of eight rows of a program, and warps, which divide the columns: 4 or 8 steps of 64 bytes each."""
    steps = columns // (GROUP if int4 else 64)
    return {"rep": 2, "warps": max(1, min(8, steps // (4 if int4 else 8)))}
