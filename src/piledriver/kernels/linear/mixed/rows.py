# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# mypy: disable-error-code="misc,name-defined,assignment"
# ruff: noqa: N803, N806, RUF005
"""Linear layers of 2 to 8 rows with int8 or int4 weights: the input stays in registers, the weight passes by.

Warps divide the columns, and each keeps its columns of all rows of the input. A program walks over tiles of 16 outputs:
codes go from memory to registers, become bf16 there and are the left operand of `mma.m16n8k16`, while those of the next
tile are on their way. Four lanes hold 64 bytes of an output; with the columns taken in that order, loads of 16 bytes a
lane are operands. Sums of the warps meet in shared memory. Their order depends on the weight alone, so a row of the
result does not depend on how many there are.

The kernel is written in Gluon, the language below Triton, because which lane holds which element must be known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options, processor_count, starts_early
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.quantised_weight import QuantisedWeight

try:
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
except ImportError:
    gluon = None

_CHUNK = 64
"""Bytes of an output that four lanes hold: a group of int4, 64 columns of int8."""
_MOST_WARPS, _MOST_CHUNKS = 16, 4
"""Warps of a program, and chunks of an output that a warp holds: of two tiles at a time."""
_REGISTERS = 128
"""Of a thread: 16 warps fill a processor with as many. The input may take half of them."""

if gluon is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.linear.mixed.conversions import CODE_UNIT, conversion_constants, converted_word

    @triton.constexpr_function
    def added_product(sums, first, second, x, begins):
        """Return PTX that adds 16 outputs by 16 columns by 8 rows to four sums, or begins them with that product.

        `sums` and `x` are the places of the first operands. Columns of an output are in the registers p of the numbers
        `first` and `second`, those of the output eight below it in the same of q.
        """
        total = ", ".join(f"${sums + i}" for i in range(4))
        return (
            f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{total}}}, "
            f"{{p{first}, q{first}, p{second}, q{second}}}, {{${x}, ${x + 1}}}, "
            f"{{{'z, z, z, z' if begins else total}}};"
        )

    @triton.constexpr_function
    def _product(INT4):
        """Return PTX for 16 outputs by one chunk by 8 rows of the input.

        Operands: 8 sums; 4 words of codes of an output and 4 of the output eight below it; then 8 words of the input
        for each piece (see `_piece`). Sums 0 and 1 are those of the first output with two rows of the input, 2 and 3
        those of the output below; 4 to 7 the same for every second instruction, which so need not wait for the first.
        """
        lines, begun = [".reg .b32 z, p<4>, q<4>; mov.b32 z, 0;", conversion_constants(INT4)], set()

        def multiply(sums, first, piece, word):
            lines.append(added_product(sums, first, first + 1, 16 + 8 * piece + 2 * word, sums not in begun))
            begun.add(sums)

        for word in range(4):
            for name, codes in (("p", 8), ("q", 12)):
                lines.append(converted_word(codes + word, name, INT4))
            if INT4:
                # Low and high four bits of a byte are 64 columns apart.
                multiply(0, 0, 0, word)
                multiply(4, 2, 1, word)
            else:
                multiply(4 * (word % 2), 0, 0, word)
        return "{\n" + "\n".join(lines) + "\n}"

    @triton.constexpr_function
    def _operands(INT4):
        """Return the constraints of `_product`."""
        return ",".join(["=&f"] * 8 + ["r"] * (24 if INT4 else 16))

    @triton.constexpr_function
    def _along(layout, axis, rank):
        """Return the layout of a vector along one of several axes."""
        for other in reversed(range(rank)):
            if other != axis:
                layout = gl.SliceLayout(other, layout)
        return layout

    @gluon.jit
    def along_axis(COUNT: gl.constexpr, AXIS: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):
        """Return 0 to COUNT along one of RANK axes."""
        found = gl.arange(0, COUNT, _along(LAYOUT, AXIS, RANK))
        for other in gl.static_range(RANK):
            if other != AXIS:
                found = gl.expand_dims(found, other)
        return found

    @gluon.jit
    def _weight_row(tile, at, half, outputs, GATE: gl.constexpr):
        """Return rows of the weight: 16 outputs, or 8 and what they gate. Those beyond the last read the last."""
        if GATE > 0:
            output = gl.minimum(tile * 8 + at, outputs - 1)
            return output // GATE * 2 * GATE + output % GATE + half * GATE
        else:
            return gl.minimum(tile * 16 + half * 8 + at, outputs - 1)

    @gluon.jit
    def _codes(weight, scales, tile, tiles, outputs, weight_stride, scale_stride, INT4: gl.constexpr,
               GATE: gl.constexpr, WARPS: gl.constexpr, CHUNKS: gl.constexpr, WORDS: gl.constexpr,
               FACTORS: gl.constexpr):  # fmt: skip
        """Return words of codes, [warps, outputs, lanes, chunks and halves of the 16 outputs, words], and scales."""
        part = along_axis(2 * CHUNKS, 3, 5, WORDS)
        rows = _weight_row(tile, along_axis(8, 1, 5, WORDS), part % 2, outputs, GATE).to(gl.int64)
        column = (along_axis(WARPS, 0, 5, WORDS) * CHUNKS + part // 2) * 16
        column += along_axis(4, 2, 5, WORDS) * 4 + along_axis(4, 4, 5, WORDS)
        words = gl.load(weight + rows * weight_stride + column, mask=tile < tiles, other=0)
        if INT4:
            rows = _weight_row(tile, along_axis(8, 1, 5, FACTORS), along_axis(2, 4, 5, FACTORS), outputs, GATE)
            column = along_axis(WARPS, 0, 5, FACTORS) * CHUNKS + along_axis(CHUNKS, 3, 5, FACTORS)
            factors = gl.load(scales + rows * scale_stride + column, mask=tile < tiles, other=0.0).to(gl.float32)
        else:
            factors = gl.full([WARPS, 8, 1, CHUNKS, 2], 1.0, gl.float32, FACTORS)
        return words, factors

    @gluon.jit
    def _piece(x, tokens, x_stride, PIECE: gl.constexpr, INT4: gl.constexpr, WARPS: gl.constexpr, CHUNKS: gl.constexpr,
               WORDS: gl.constexpr):  # fmt: skip
        """Return the rows of the input: all their columns for int8, the first or second half of each group for int4.

        The codes of a word become two operands, of columns 0 and 2 and of columns 1 and 3; so do elements here.
        """
        HALVES: gl.constexpr = 2 if INT4 else 1
        part = along_axis(2 * CHUNKS, 3, 5, WORDS)
        row = gl.minimum(along_axis(8, 1, 5, WORDS), tokens - 1)
        column = (along_axis(WARPS, 0, 5, WORDS) * CHUNKS + part // 2) * (32 * HALVES) + PIECE * 32
        column += along_axis(4, 2, 5, WORDS) * 8 + part % 2 * 4 + along_axis(4, 4, 5, WORDS)
        return gl.inline_asm_elementwise(
            "{ prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632; }", "=&r,=&r,r,r",
            [gl.load(x + row * x_stride + column)], dtype=gl.int32, is_pure=True, pack=2,
        )  # fmt: skip

    @gluon.jit
    def _sums_of_warp(words, factors, pieces, INT4: gl.constexpr, WARPS: gl.constexpr, CHUNKS: gl.constexpr):
        """Return sums over the columns of each warp, [warps, rows x 8 x 2]: an output beside the one eight below it."""
        ALL: gl.constexpr = gl.BlockedLayout(
            [1, 1, 1, CHUNKS, 2, 2, 2], [1, 8, 4, 1, 1, 1, 1], [WARPS, 1, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
        )
        sums = gl.inline_asm_elementwise(
            _product(INT4), _operands(INT4), (words,) + pieces, dtype=gl.float32, is_pure=True, pack=8
        )
        # Axes: warps, outputs, pairs of rows, chunks, every second instruction, halves of 16 outputs, rows of a pair.
        sums = gl.convert_layout(gl.reshape(sums, [WARPS, 8, 4, CHUNKS, 2, 2, 2]), ALL, assert_trivial=True)
        if INT4:
            factors = gl.reshape(factors, [WARPS, 8, 1, CHUNKS, 1, 2, 1])
            sums = sums * gl.convert_layout(factors, ALL, assert_trivial=True)
        total = gl.permute(gl.sum(gl.sum(sums, axis=3), axis=3), [0, 2, 4, 1, 3])
        return gl.reshape(total * CODE_UNIT, [WARPS, 128])

    @gluon.jit
    def store_outputs(total, out, residual, index, token, outputs, tokens, out_stride, residual_stride,
                      RESIDUAL: gl.constexpr):  # fmt: skip
        """Add the residual and store what lies inside the result."""
        inside = (index < outputs) & (token < tokens)
        if RESIDUAL:
            place = residual + token * residual_stride + index
            total += gl.load(place, mask=inside, other=0.0).to(gl.float32)
        gl.store(out + token * out_stride + index, total.to(out.dtype.element_ty), mask=inside)

    @gluon.jit(do_not_specialize=["tokens", "tiles"])
    def _mixed_rows(
        x, weight, scales, bias, residual, out, outputs, tokens, tiles, x_stride, weight_stride, scale_stride,
        out_stride, residual_stride,
        INT4: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, WARPS: gl.constexpr,
        CHUNKS: gl.constexpr,
    ):  # fmt: skip
        gdc_launch_dependents()
        WORDS: gl.constexpr = gl.BlockedLayout(
            [1, 1, 1, 2 * CHUNKS, 4], [1, 8, 4, 1, 1], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0]
        )
        FACTORS: gl.constexpr = gl.BlockedLayout(
            [1, 1, 1, CHUNKS, 2], [1, 8, 4, 1, 1], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0]
        )
        PARTS: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [1, WARPS], [1, 0])
        PLACES: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [4, 8], [1, WARPS], [1, 0]))
        program, step = gl.program_id(0), gl.num_programs(0)
        words, factors = _codes(weight, scales, program, tiles, outputs, weight_stride, scale_stride, INT4, GATE, WARPS,
                                CHUNKS, WORDS, FACTORS)  # fmt: skip
        gdc_wait()
        pieces = ()
        for piece in gl.static_range(2 if INT4 else 1):
            pieces = pieces + (_piece(x, tokens, x_stride, piece, INT4, WARPS, CHUNKS, WORDS),)
        memory = gl.allocate_shared_memory(gl.float32, [WARPS, 128], gl.SwizzledSharedLayout(8, 1, 4, order=[1, 0]))
        place = gl.arange(0, 64, PLACES)
        token, at = place // 8, place % 8
        for tile in range(program, tiles, step):
            next_words, next_factors = _codes(weight, scales, tile + step, tiles, outputs, weight_stride, scale_stride,
                                              INT4, GATE, WARPS, CHUNKS, WORDS, FACTORS)  # fmt: skip
            memory.store(_sums_of_warp(words, factors, pieces, INT4, WARPS, CHUNKS))
            total = gl.sum(memory.load(PARTS), axis=0)
            first, second = gl.split(gl.reshape(total, [64, 2]))
            first = gl.convert_layout(first, PLACES, assert_trivial=True)
            second = gl.convert_layout(second, PLACES, assert_trivial=True)
            row, below = _weight_row(tile, at, 0, outputs, GATE), _weight_row(tile, at, 1, outputs, GATE)
            if not INT4:
                first = first * gl.load(scales + row * scale_stride).to(gl.float32)
                second = second * gl.load(scales + below * scale_stride).to(gl.float32)
            if BIAS:
                first += gl.load(bias + row).to(gl.float32)
                second += gl.load(bias + below).to(gl.float32)
            if GATE > 0:
                index, first = tile * 8 + at, first / (1.0 + gl.exp(-first)) * second
                store_outputs(
                    first, out, residual, index, token, outputs, tokens, out_stride, residual_stride, RESIDUAL
                )
            else:
                index = tile * 16 + at
                store_outputs(
                    first, out, residual, index, token, outputs, tokens, out_stride, residual_stride, RESIDUAL
                )
                store_outputs(
                    second, out, residual, index + 8, token, outputs, tokens, out_stride, residual_stride, RESIDUAL
                )
            words, factors = next_words, next_factors


def mixed_rows(x: Tensor, weight: QuantisedWeight, fused: Fused = PRODUCT_ONLY) -> Tensor:
    """Return the linear layer of [rows, columns] with an int8 or int4 weight."""
    _, _, bias, gate_block, residual = fused
    words, data, scales = fused.normalised(x).view(torch.int32), weight.data.view(torch.int32), weight.scales
    outputs = data.shape[0] // 2 if gate_block else data.shape[0]
    tiles = -(-outputs // (8 if gate_block else 16))
    warps, chunks = _division(weight)
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    programs = processor_count(x.device) * (_MOST_WARPS // warps)  # as many as run at a time
    _mixed_rows[(min(tiles, programs),)](
        words, data, scales, x if bias is None else bias, x if residual is None else residual, out, outputs, len(x),
        tiles, words.stride(0), data.stride(0), scales.stride(0), out.stride(0),
        0 if residual is None else residual.stride(0),
        INT4=weight.kind == "int4", GATE=gate_block, BIAS=bias is not None, RESIDUAL=residual is not None,
        WARPS=warps, CHUNKS=chunks, num_warps=warps, maxnreg=_REGISTERS, **launch_options(True),
    )  # fmt: skip
    return out


def fits_mixed_rows(x: Tensor, weight: QuantisedWeight) -> bool:
    """Return whether the kernel takes these: at most 8 rows of bf16 that fit in registers, on Hopper and later."""
    if gluon is None or weight.kind == "fp8" or len(x) > 8 or x.dtype != torch.bfloat16 or not starts_early(x.device):
        return False
    warps, chunks = _division(weight)
    words = 8 * chunks * (2 if weight.kind == "int4" else 1)
    whole = warps * chunks * _CHUNK == weight.data.shape[1] and not warps & (warps - 1) and not chunks & (chunks - 1)
    return whole and in_words(x) and warps > 1 and chunks <= _MOST_CHUNKS and words <= _REGISTERS // 2


def in_words(x: Tensor) -> bool:
    """Return whether rows of 16-bit numbers can be read as 32-bit words."""
    return x.stride(1) == 1 and x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0


def _division(weight: QuantisedWeight) -> tuple[int, int]:
    """Return how many warps divide the columns, and the chunks of each: 8 warps, or 16 where 8 have too many chunks."""
    chunks = weight.data.shape[1] // _CHUNK
    warps = min(chunks, 8 if chunks <= 8 * _MOST_CHUNKS else _MOST_WARPS)
    return max(warps, 1), chunks // max(warps, 1)
