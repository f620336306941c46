# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# mypy: disable-error-code="misc,name-defined,assignment"
# ruff: noqa: N803, N806, RUF005
"""Linear layers of 2 to 16 rows with int4 weights: the input stays in registers, the weight streams past.

As many programs as processors walk over tiles of 16 outputs. One warp copies codes to shared memory, a tile ahead of
two groups of four warps, which divide the columns. Each warp keeps its columns of all rows of the input in registers.
Four lanes hold 64 bytes of an output; with the columns taken in that order, loads of 16 bytes a lane are operands of
`mma.m16n8k16`. Sums of the warps meet in shared memory, where the groups take turns to add them up. Their order depends
on the weight and on whether there are more than 8 rows.

In `rows`, codes go from memory to registers. That is faster with few columns, where barriers and copies cost more.

The kernel is written in Gluon, the language below Triton, for its warps of different work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.mixed.hopper import hopper_processors, is_aligned
from piledriver.kernels.linear.mixed.rows import in_words
from piledriver.kernels.linear.weights import QuantisedWeight

try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    gluon = None

_ROWS, _OUTPUTS, _BYTES, _WARPS = 16, 16, 64, 8
"""Most rows of the input, outputs of a tile, bytes of an output that four lanes hold, and warps that multiply."""
_CHUNKS = (1, 2, 4)
"""Chunks of `_BYTES` of an output that a warp may take: with more, the input would not fit in registers."""
_STAGES, _SLOTS = 2, 4
"""Tiles of codes and of sums in shared memory. With more stages, copies of later tiles delay earlier ones."""

if gluon is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.linear.mixed.hopper import async_load, reinterpret
    from piledriver.kernels.linear.mixed.rows import added_product, along_axis, store_outputs

    @triton.constexpr_function
    def _product(ROWS):
        """Return PTX for 16 outputs by one chunk by 8 or 16 rows of the input.

        Operands: 8 sums; 4 words of codes of an output and 4 of the output eight below it; 8 words of the input for low
        codes of rows 0 to 7, of the other rows if there are 16, then the same for high codes. The first four sums are
        those of rows 0 to 7 and the last four those of the others; with 8 rows, of low and of high codes.
        """
        lines = [".reg .b32 l, h, z, m, p<4>, q<4>;", "mov.b32 z, 0;", "mov.b32 m, 0x43084308;"]
        begun, blocks = set(), ROWS // 8

        def convert(name, word):
            # bf16 has 128 as a number whose last 7 bits count in ones: see `conversions`.
            lines.append(f"and.b32 l, ${word}, 0x0F0F0F0F;")
            lines.append(f"shr.b32 h, ${word}, 4;")
            lines.append("and.b32 h, h, 0x0F0F0F0F;")
            for number, half in enumerate("lh"):
                for pair, choice in enumerate(("0x4140", "0x4342")):
                    lines.append(f"prmt.b32 {name}{2 * number + pair}, {half}, 0x43434343, {choice};")
                    lines.append(f"sub.rn.bf16x2 {name}{2 * number + pair}, {name}{2 * number + pair}, m;")

        def multiply(sums, first, x):
            lines.append(added_product(sums, first, first + 1, x, sums not in begun))
            begun.add(sums)

        for word in range(4):
            convert("p", 8 + word)
            convert("q", 12 + word)
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
    def _lines(CHUNKS):
        """Return the layout of [4 warps, chunks, 16 outputs, 16 words]: four words of two outputs a lane and chunk."""
        chunks = [[0, 1 << bit, 0, 0] for bit in range(CHUNKS.bit_length() - 1)]
        return gl.DistributedLinearLayout(
            [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 8, 0], *chunks],
            [[0, 0, 0, 4], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
            [[1, 0, 0, 0], [2, 0, 0, 0]],
            [],
            [4, CHUNKS, 16, 16],
        )

    @gluon.jit
    def _first_row(turn, GATE: gl.constexpr):
        """Return the first of the 16 rows of the weight that a program takes in a turn: with a gate, gate then up."""
        if GATE > 0:
            at = (gl.program_id(0) + turn // 2 * gl.num_programs(0)) * 16
            return at // GATE * (2 * GATE) + at % GATE + turn % 2 * GATE
        else:
            return (gl.program_id(0) + turn * gl.num_programs(0)) * 16

    @gluon.jit
    def _load(memory, weight, turns, GATE: gl.constexpr, STAGES: gl.constexpr):
        """Load the codes of all tiles in turn, each as soon as both groups are done with what its place held."""
        codes, _, ready, empty, _ = memory
        for turn in range(turns):
            place = turn % STAGES
            if turn >= STAGES:
                mbarrier.wait(empty.index(place), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(ready.index(place), weight.block_type.nbytes)
            async_load(weight, [0, _first_row(turn, GATE), 0], ready.index(place), codes.index(place))

    @gluon.jit
    def _piece(x, tokens, x_stride, HALF: gl.constexpr, FIRST: gl.constexpr, GROUP: gl.constexpr, CHUNKS: gl.constexpr,
               LINES: gl.constexpr):  # fmt: skip
        """Return 8 rows of the input from `FIRST` on, of the columns of low or of high codes, as operands."""
        row, word = along_axis(16, 2, 4, LINES), along_axis(16, 3, 4, LINES)
        chunk = (GROUP * 4 + along_axis(4, 0, 4, LINES)) * CHUNKS + along_axis(CHUNKS, 1, 4, LINES)
        token = FIRST + row % 8
        column = chunk * 64 + HALF * 32 + word // 4 * 8 + row // 8 * 4 + word % 4
        return gl.load(x + token * x_stride + column, mask=token < tokens, other=0)

    @triton.constexpr_function
    def _scale_layout(CHUNKS):
        """Return the layout of [4 warps, 8 outputs, 2 halves of 16 outputs, chunks]: one load for all chunks."""
        chunks = [[0, 0, 0, 1 << bit] for bit in range(CHUNKS.bit_length() - 1)]
        return gl.DistributedLinearLayout(
            [*chunks, [0, 0, 1, 0]],
            [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
            [[1, 0, 0, 0], [2, 0, 0, 0]],
            [],
            [4, 8, 2, CHUNKS],
        )

    @gluon.jit
    def _scale(scales, turn, weight_rows, scale_stride, GROUP: gl.constexpr, GATE: gl.constexpr, CHUNKS: gl.constexpr,
               ALL: gl.constexpr):  # fmt: skip
        """Return the scales of what a group takes in a turn, [4 warps, chunks, 1, 8, 1, 2, 1]."""
        LAYOUT: gl.constexpr = _scale_layout(CHUNKS)
        row = _first_row(turn, GATE) + along_axis(8, 1, 4, LAYOUT) + along_axis(2, 2, 4, LAYOUT) * 8
        column = (GROUP * 4 + along_axis(4, 0, 4, LAYOUT)) * CHUNKS + along_axis(CHUNKS, 3, 4, LAYOUT)
        found = gl.load(scales + gl.minimum(row, weight_rows - 1) * scale_stride + column)
        return gl.convert_layout(gl.reshape(gl.permute(found, [0, 3, 1, 2]), [4, CHUNKS, 1, 8, 1, 2, 1]), ALL)

    @gluon.jit
    def _sum_of_warps(slots, turn, bias, row, BIAS: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr,
                      LAYOUT: gl.constexpr):  # fmt: skip
        total = gl.zeros([ROWS, 16], gl.float32, LAYOUT)
        for warp in gl.static_range(8):
            total += slots.index(turn % SLOTS * 8 + warp).load(LAYOUT)
        if BIAS:
            total = total + gl.expand_dims(gl.load(bias + row).to(gl.float32), 0)
        return total

    @gluon.jit
    def _finish(slots, turn, given, GATE: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ROWS: gl.constexpr,
                SLOTS: gl.constexpr):  # fmt: skip
        """Add up the sums of a tile, or of gate and up, apply the epilogue and store the outputs."""
        _, bias, residual, out, outputs, tokens, _, out_stride, residual_stride = given
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, ROWS // 8], [ROWS // 4, 128 // ROWS], [4, 1], [1, 0])
        weight_rows = outputs * (2 if GATE > 0 else 1)
        at, token = gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)), gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        index = _first_row(turn, GATE) + at
        found = _sum_of_warps(slots, turn, bias, gl.minimum(index, weight_rows - 1), BIAS, ROWS, SLOTS, LAYOUT)
        if GATE > 0:
            row = gl.minimum(_first_row(turn - 1, GATE) + at, weight_rows - 1)
            gate = _sum_of_warps(slots, turn - 1, bias, row, BIAS, ROWS, SLOTS, LAYOUT)
            found = gate / (1.0 + gl.exp(-gate)) * found
            index = (gl.program_id(0) + turn // 2 * gl.num_programs(0)) * 16 + at
        index, token = gl.expand_dims(index, 0), gl.expand_dims(token, 1)
        store_outputs(found, out, residual, index, token, outputs, tokens, out_stride, residual_stride, RESIDUAL)

    @gluon.jit
    def _finishes(turn, GROUP: gl.constexpr, GATE: gl.constexpr):
        """Return whether a group of warps finishes the outputs of a turn."""
        if GATE > 0:
            return (turn & 3) == 2 * GROUP + 1
        else:
            return (turn & 1) == GROUP

    @gluon.jit
    def _multiply(memory, given, x, x_stride, turns, GROUP: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
                  RESIDUAL: gl.constexpr, ROWS: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
                  SLOTS: gl.constexpr):  # fmt: skip
        """Multiply the columns of a group of warps, and finish every second tile."""
        code_stages, slots, ready, empty, summed = memory
        scales, _, _, _, outputs, tokens, scale_stride, _, _ = given
        LINES: gl.constexpr = _lines(CHUNKS)
        ALL: gl.constexpr = gl.BlockedLayout(
            [1, CHUNKS, 2, 1, 1, 2, 2], [1, 1, 1, 8, 4, 1, 1], [4, 1, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
        )
        weight_rows = outputs * (2 if GATE > 0 else 1)
        codes = reinterpret(code_stages, gl.int32, [STAGES * 2, 4, CHUNKS, 16, 16], gl.NVMMASharedLayout(64, 32, 4))
        sums = reinterpret(slots, gl.float32, [SLOTS * 2, 4, ROWS, 16], gl.SwizzledSharedLayout(8, 2, 2, [2, 1, 0]))
        factor = _scale(scales, 0, weight_rows, scale_stride, GROUP, GATE, CHUNKS, ALL)
        gdc_wait()
        pieces = ()
        for half in gl.static_range(2):
            for first in gl.static_range(0, ROWS, 8):
                pieces = pieces + (_piece(x, tokens, x_stride, half, first, GROUP, CHUNKS, LINES),)
        for turn in range(turns):
            place = turn % STAGES
            following = _scale(scales, turn + 1, weight_rows, scale_stride, GROUP, GATE, CHUNKS, ALL)
            mbarrier.wait(ready.index(place), turn // STAGES & 1)
            some = codes.index(place * 2 + GROUP).load(LINES)
            tl.debug_barrier()
            mbarrier.arrive(empty.index(place))
            part = gl.inline_asm_elementwise(
                _product(ROWS), _operands(ROWS), (some,) + pieces, dtype=gl.float32, is_pure=True, pack=8
            )
            # Axes: warps, chunks, blocks of sums, outputs, pairs of rows, halves of the 16 outputs, rows of a pair.
            part = gl.convert_layout(gl.reshape(part, [4, CHUNKS, 2, 8, 4, 2, 2]), ALL, assert_trivial=True)
            total = gl.sum(part * factor.to(gl.float32), axis=1)
            factor = following
            if ROWS == 16:
                total = gl.reshape(gl.permute(total, [0, 1, 3, 5, 4, 2]), [4, 16, 16])
            else:
                total = gl.reshape(gl.permute(gl.sum(total, axis=1), [0, 2, 4, 3, 1]), [4, 8, 16])
            # A slot is written again after 4 turns. By then its sums have been added up: a group does so before it
            # arrives for the turn after the next, and both groups have arrived for the turn before this one.
            if turn > 0:
                mbarrier.wait(summed, (turn - 1) & 1)
            sums.index(turn % SLOTS * 2 + GROUP).store(total)
            tl.debug_barrier()
            mbarrier.arrive(summed)
            if (turn > 0) & _finishes(turn - 1, GROUP, GATE):
                _finish(slots, turn - 1, given, GATE, BIAS, RESIDUAL, ROWS, SLOTS)
        mbarrier.wait(summed, (turns - 1) & 1)
        if _finishes(turns - 1, GROUP, GATE):
            _finish(slots, turns - 1, given, GATE, BIAS, RESIDUAL, ROWS, SLOTS)

    @gluon.jit(do_not_specialize=["tokens", "tiles"])
    def _pipelined_rows(
        x, weight, scales, bias, residual, out, outputs, tokens, tiles, x_stride, scale_stride, out_stride,
        residual_stride,
        GATE: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ROWS: gl.constexpr, CHUNKS: gl.constexpr,
        STAGES: gl.constexpr, SLOTS: gl.constexpr,
    ):  # fmt: skip
        gdc_launch_dependents()
        codes = gl.allocate_shared_memory(weight.dtype, [STAGES, 8 * CHUNKS, 16, 64], weight.layout)
        slots = gl.allocate_shared_memory(gl.float32, [SLOTS * 8, ROWS, 16], gl.SwizzledSharedLayout(8, 2, 2, [1, 0]))
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for place in gl.static_range(STAGES):
            mbarrier.init(ready.index(place), count=1)
            mbarrier.init(empty.index(place), count=2)
        mbarrier.init(summed, count=2)
        turns = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * (2 if GATE > 0 else 1)
        memory = (codes, slots, ready, empty, summed)
        given = (scales, bias, residual, out, outputs, tokens, scale_stride, out_stride, residual_stride)
        gl.warp_specialize(
            [
                (_multiply, (memory, given, x, x_stride, turns, 0, GATE, BIAS, RESIDUAL, ROWS, CHUNKS, STAGES, SLOTS)),
                (_multiply, (memory, given, x, x_stride, turns, 1, GATE, BIAS, RESIDUAL, ROWS, CHUNKS, STAGES, SLOTS)),
                (_load, (memory, weight, turns, GATE, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


def pipelined_rows(x: Tensor, weight: QuantisedWeight, fused: Fused = PRODUCT_ONLY) -> Tensor:
    """Return the linear layer of [rows, columns] with an int4 weight."""
    _, _, bias, gate_block, residual = fused
    data, scales, words = weight.data, weight.scales, fused.normalised(x).view(torch.int32)
    outputs = len(data) // 2 if gate_block else len(data)
    tiles, chunks = -(-outputs // _OUTPUTS), data.shape[1] // _BYTES
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    blocks = data.unflatten(1, (-1, _BYTES)).permute(1, 0, 2)
    _pipelined_rows[(min(tiles, hopper_processors(x.device)),)](
        words, TensorDescriptor.from_tensor(blocks, [chunks, _OUTPUTS, _BYTES], gl.NVMMASharedLayout(64, 8, 3)),
        scales, x if bias is None else bias, x if residual is None else residual, out, outputs, len(x), tiles,
        words.stride(0), scales.stride(0), out.stride(0), 0 if residual is None else residual.stride(0),
        GATE=gate_block, BIAS=bias is not None, RESIDUAL=residual is not None, ROWS=8 if len(x) <= 8 else _ROWS,
        CHUNKS=chunks // _WARPS, STAGES=_STAGES, SLOTS=_SLOTS, num_warps=4, maxnreg=168, **launch_options(True),
    )  # fmt: skip
    return out


def fits_pipelined_rows(x: Tensor, weight: QuantisedWeight, gate_block: int) -> bool:
    """Return whether the kernel takes these: at most 16 rows of bf16 that fit in registers, on Hopper."""
    if gluon is None or weight.kind != "int4" or len(x) > _ROWS or not hopper_processors(x.device):
        return False
    return (
        x.dtype == torch.bfloat16
        and gate_block % _OUTPUTS == 0
        and weight.data.shape[1] in [chunks * _WARPS * _BYTES for chunks in _CHUNKS]
        and in_words(x)
        and is_aligned(weight.data)
    )
