# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# mypy: disable-error-code="misc,name-defined,assignment"
# ruff: noqa: N803, N806, RUF005
"""Tiles of 16 outputs of an int4 weight, times 2 to 16 rows of the input that stay in registers.

Warps divide the columns into chunks of 64 bytes of codes, which share a scale. Four lanes hold a chunk of an output;
with the columns taken in that order, loads of 16 bytes a lane are operands of `mma.m16n8k16`. Each warp keeps its
columns of all rows of the input. `pipelined_rows` and `resident_rows` differ in how codes reach shared memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.linear.mixed.hopper import hopper_processors, is_aligned
from piledriver.kernels.linear.mixed.rows import in_words
from piledriver.kernels.quantised_weight import QuantisedWeight

try:
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
except ImportError:
    gluon = None

MOST_ROWS, OUTPUTS, WARPS = 16, 16, 8
"""Most rows of the input, outputs of a tile, and warps of a program that multiply."""
BYTES = 64
"""Bytes of an output that four lanes hold: a chunk."""

if gluon is not None:
    from piledriver.kernels.linear.mixed.conversions import CODE_UNIT, conversion_constants, converted_word
    from piledriver.kernels.linear.mixed.rows import added_product, along_axis

    @triton.constexpr_function
    def _product(ROWS):
        """Return PTX for 16 outputs by one chunk by 8 or 16 rows of the input.

        Operands: 8 sums; 4 words of codes of an output and 4 of the output eight below it; 8 words of the input for low
        codes of rows 0 to 7, of the other rows if there are 16, then the same for high codes. The first four sums are
        those of rows 0 to 7 and the last four those of the others; with 8 rows, of low and of high codes.
        """
        lines = [".reg .b32 z, p<4>, q<4>; mov.b32 z, 0;", conversion_constants(True)]
        begun, blocks = set(), ROWS // 8

        def multiply(sums, first, x):
            lines.append(added_product(sums, first, first + 1, x, sums not in begun))
            begun.add(sums)

        for word in range(4):
            for name, codes in (("p", 8), ("q", 12)):
                lines.append(converted_word(codes + word, name, True, NEIGHBOURS=True))
            for half in range(2):
                for block in range(blocks):
                    sums = block if blocks == 2 else half
                    multiply(4 * sums, 2 * half, 16 + 8 * (blocks * half + block) + 2 * word)
        return "{\n" + "\n".join(lines) + "\n}"

    @triton.constexpr_function
    def _operands(ROWS):
        """Return the constraints of `_product`."""
        return ",".join(["=&f"] * 8 + ["r"] * (8 + 2 * ROWS))

    @triton.constexpr_function
    def _bits(COUNT, AXIS):
        """Return the bases of a layout along one of four axes: 1, 2, 4 and so on, below a power of two."""
        return [[1 << bit if axis == AXIS else 0 for axis in range(4)] for bit in range(COUNT.bit_length() - 1)]

    @triton.constexpr_function
    def code_layout(COUNT, CHUNKS):
        """Return the layout of [warps, chunks, 16 outputs, 16 words]: four words of two outputs a lane and chunk."""
        return gl.DistributedLinearLayout(
            [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 8, 0], *_bits(CHUNKS, 1)],
            [[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
            _bits(COUNT, 0),
            [],
            [COUNT, CHUNKS, 16, 16],
        )

    @triton.constexpr_function
    def _scale_layout(COUNT, CHUNKS):
        """Return the layout of [warps, 8 outputs, 2 halves of 16 outputs, chunks]: one load for all chunks."""
        return gl.DistributedLinearLayout(
            [*_bits(CHUNKS, 3), [0, 0, 1, 0]],
            [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
            _bits(COUNT, 0),
            [],
            [COUNT, 8, 2, CHUNKS],
        )

    @triton.constexpr_function
    def _sum_layout(COUNT, CHUNKS):
        """Return the layout of sums of chunks.

        Axes: warps, chunks, blocks of sums, outputs, pairs of rows, halves of the 16 outputs, rows of a pair.
        """
        return gl.BlockedLayout(
            [1, CHUNKS, 2, 1, 1, 2, 2], [1, 1, 1, 8, 4, 1, 1], [COUNT, 1, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
        )

    @gluon.jit
    def _piece(x, tokens, x_stride, HALF: gl.constexpr, FIRST: gl.constexpr, WARP: gl.constexpr, COUNT: gl.constexpr,
               CHUNKS: gl.constexpr):  # fmt: skip
        """Return 8 rows of the input from `FIRST` on, of the columns of low or of high codes, as operands."""
        LINES: gl.constexpr = code_layout(COUNT, CHUNKS)
        row, word = along_axis(16, 2, 4, LINES), along_axis(16, 3, 4, LINES)
        chunk = (WARP + along_axis(COUNT, 0, 4, LINES)) * CHUNKS + along_axis(CHUNKS, 1, 4, LINES)
        token = FIRST + row % 8
        column = chunk * 64 + HALF * 32 + word // 4 * 8 + row // 8 * 4 + word % 4
        return gl.load(x + token * x_stride + column, mask=token < tokens, other=0)

    @gluon.jit
    def load_input(x, tokens, x_stride, WARP: gl.constexpr, COUNT: gl.constexpr, CHUNKS: gl.constexpr,
                   ROWS: gl.constexpr):  # fmt: skip
        """Return all rows of the input as operands of `COUNT` warps from `WARP` on."""
        pieces = ()
        for half in gl.static_range(2):
            for first in gl.static_range(0, ROWS, 8):
                pieces = pieces + (_piece(x, tokens, x_stride, half, first, WARP, COUNT, CHUNKS),)
        return pieces

    @gluon.jit
    def load_scales(scales, first, weight_rows, scale_stride, WARP: gl.constexpr, COUNT: gl.constexpr,
                    CHUNKS: gl.constexpr):  # fmt: skip
        """Return the scales of 16 rows of the weight from `first` on; those beyond the last read the last."""
        LAYOUT: gl.constexpr = _scale_layout(COUNT, CHUNKS)
        row = first + along_axis(8, 1, 4, LAYOUT) + along_axis(2, 2, 4, LAYOUT) * 8
        column = (WARP + along_axis(COUNT, 0, 4, LAYOUT)) * CHUNKS + along_axis(CHUNKS, 3, 4, LAYOUT)
        found = gl.load(scales + gl.minimum(row, weight_rows - 1) * scale_stride + column)
        found = gl.reshape(gl.permute(found, [0, 3, 1, 2]), [COUNT, CHUNKS, 1, 8, 1, 2, 1])
        return gl.convert_layout(found, _sum_layout(COUNT, CHUNKS))

    @gluon.jit
    def tile_sums(codes, pieces, factor, COUNT: gl.constexpr, CHUNKS: gl.constexpr, ROWS: gl.constexpr):
        """Return [warps, rows, 16 outputs]: what each warp has of a tile."""
        part = gl.inline_asm_elementwise(
            _product(ROWS), _operands(ROWS), (codes,) + pieces, dtype=gl.float32, is_pure=True, pack=8
        )
        part = gl.reshape(part, [COUNT, CHUNKS, 2, 8, 4, 2, 2])
        part = gl.convert_layout(part, _sum_layout(COUNT, CHUNKS), assert_trivial=True)
        total = gl.sum(part * factor.to(gl.float32), axis=1) * CODE_UNIT
        if ROWS == 16:
            return gl.reshape(gl.permute(total, [0, 1, 3, 5, 4, 2]), [COUNT, 16, 16])
        else:
            return gl.reshape(gl.permute(gl.sum(total, axis=1), [0, 2, 4, 3, 1]), [COUNT, 8, 16])


def fits_rows(x: Tensor, weight: QuantisedWeight) -> bool:
    """Return whether kernels of such tiles take these: int4, at most 16 rows of bf16, on Hopper."""
    if gluon is None or weight.kind != "int4" or len(x) > MOST_ROWS or not hopper_processors(x.device):
        return False
    return x.dtype == torch.bfloat16 and in_words(x) and is_aligned(weight.data)
