# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803, N806
"""Linear layers of 9 to 16 rows with int8 weights: the input stays in shared memory, the weight streams past.

A program computes tiles of 64 outputs. One of its warps loads codes of the weight, and once all rows of the input. Four
groups of four warps divide the columns: codes become bf16 in registers and are the left operand of matrix instructions.
The groups add up their sums in shared memory, each those of four rows. Their order depends on the weight alone, so a
row of the result does not depend on how many there are.

The kernel is written in Gluon, the language below Triton, for its warps of different work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.mixed.hopper import described_blocks, hopper_processors, is_aligned, layout_of_blocks
from piledriver.kernels.quantised_weight import QuantisedWeight

try:
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier
except ImportError:
    gluon = None

_ROWS, _OUTPUTS, _COLUMNS = 16, 64, 64
"""Rows and outputs of a tile, and columns that a group takes at a time."""
_GROUPS, _STAGES, _AHEAD, _PARTS = 4, 3, 2, 2
"""Groups of warps; stages in shared memory, and how many are loaded before the input; loads of the input."""
_MOST_COLUMNS = 4096
"""With more, the input would leave no room for stages."""
_GATE = 32
"""Rows of gate and up in a tile, if there is a gate."""

if gluon is not None:
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2

    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.linear.mixed.conversions import CODE_UNIT, from_int8
    from piledriver.kernels.linear.mixed.hopper import async_load, reinterpret
    from piledriver.kernels.linear.mixed.rows import store_outputs

    @gluon.jit
    def _load_codes(memory, weight, turn, GROUPS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr):
        """Load what all groups take in a turn."""
        _, codes, _, ready, _, _, _ = memory
        tile = gl.program_id(0) + turn // TURNS * gl.num_programs(0)
        mbarrier.expect(ready.index(turn % STAGES), weight.block_type.nbytes)
        async_load(
            weight, [turn % TURNS * GROUPS, tile * 64, 0], ready.index(turn % STAGES), codes.index(turn % STAGES)
        )

    @gluon.jit
    def _load(memory, x, weight, tiles, GROUPS: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
              TURNS: gl.constexpr, PARTS: gl.constexpr):  # fmt: skip
        """Load the input once, and the codes of all tiles in turn. Only the input may come from the kernel before."""
        x_tiles, _, _, _, empty, x_ready, _ = memory
        turns = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0) * TURNS
        for turn in range(gl.minimum(turns, AHEAD)):
            _load_codes(memory, weight, turn, GROUPS, STAGES, TURNS)
        gdc_wait()
        for part in gl.static_range(PARTS):
            mbarrier.expect(x_ready.index(part), x.block_type.nbytes)
            async_load(x, [part * x.block_type.shape[0], 0, 0], x_ready.index(part), x_tiles.index(part))
        for turn in range(AHEAD, turns):
            if turn >= STAGES:
                mbarrier.wait(empty.index(turn % STAGES), (turn // STAGES & 1) ^ 1)
            _load_codes(memory, weight, turn, GROUPS, STAGES, TURNS)

    @gluon.jit
    def _epilogue(slots, base, scales, bias, index, scale_stride, FIRST: gl.constexpr, COUNT: gl.constexpr,
                  GROUP: gl.constexpr, GROUPS: gl.constexpr, BIAS: gl.constexpr,
                  LAYOUT: gl.constexpr):  # fmt: skip
        """Return four rows by some outputs of a tile: the sums of all groups, times scales, with the bias."""
        total = gl.zeros([4, COUNT], gl.float32, LAYOUT)
        for slot in gl.static_range(GROUPS):
            total += slots.index(base + slot).slice(4 * GROUP, 4).slice(FIRST, COUNT, 1).load(LAYOUT)
        scale = gl.load(scales + index * scale_stride).to(gl.float32) * CODE_UNIT
        total = total * gl.expand_dims(scale, 0)
        if BIAS:
            total = total + gl.expand_dims(gl.load(bias + index).to(gl.float32), 0)
        return total

    @gluon.jit
    def _multiply(memory, given, GROUP: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr,
                  RESIDUAL: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
                  PARTS: gl.constexpr, X: gl.constexpr, CODES: gl.constexpr):  # fmt: skip
        """Multiply the columns of a group of warps, and store four rows of the result."""
        x_parts, code_stages, slots, ready, empty, x_ready, summed = memory
        scales, bias, residual, out, outputs, tokens, tiles, scale_stride, out_stride, residual_stride = given
        SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
        INPUT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
        WIDTH: gl.constexpr = 32 if GATE else 64
        FOUR: gl.constexpr = gl.BlockedLayout([1, WIDTH // 32], [1, 32], [4, 1], [1, 0])
        x_tiles = reinterpret(x_parts, x_parts.dtype, [TURNS * GROUPS, 16, 64], X)
        codes = reinterpret(code_stages, code_stages.dtype, [STAGES * GROUPS, 64, 64], CODES)
        weight_rows = outputs * (2 if GATE else 1)
        turn = 0
        for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
            total = gl.zeros([64, 16], gl.float32, SUMS)
            for step in range(TURNS):
                place, stage = turn % STAGES, step * GROUPS + GROUP
                mbarrier.wait(ready.index(place), turn // STAGES & 1)
                some = codes.index(place * GROUPS + GROUP).load(OPERAND)
                tl.debug_barrier()
                mbarrier.arrive(empty.index(place))
                mbarrier.wait(x_ready.index(step * PARTS // TURNS), 0)
                y = x_tiles.index(stage).permute((1, 0)).load(INPUT)
                total = mma_v2(from_int8(some, some, True), y, total)
                turn += 1
            # Two tiles take turns with the slots: all groups have read those of a tile before the next one's sums meet.
            odd = (turn // TURNS - 1) & 1
            base = odd * GROUPS
            slots.index(base + GROUP).permute((1, 0)).store(total)
            tl.debug_barrier()
            mbarrier.arrive(summed)
            mbarrier.wait(summed, odd)
            at, token = gl.arange(0, WIDTH, gl.SliceLayout(0, FOUR)), gl.arange(0, 4, gl.SliceLayout(1, FOUR))
            row = gl.minimum(tile * 64 + at, weight_rows - 1)
            found = _epilogue(slots, base, scales, bias, row, scale_stride, 0, WIDTH, GROUP, GROUPS, BIAS,
                              FOUR)  # fmt: skip
            if GATE:
                row = gl.minimum(tile * 64 + 32 + at, weight_rows - 1)
                up = _epilogue(slots, base, scales, bias, row, scale_stride, 32, WIDTH, GROUP, GROUPS, BIAS,
                               FOUR)  # fmt: skip
                found = found / (1.0 + gl.exp(-found)) * up
            index, token = gl.expand_dims(tile * WIDTH + at, 0), gl.expand_dims(4 * GROUP + token, 1)
            store_outputs(found, out, residual, index, token, outputs, tokens, out_stride, residual_stride, RESIDUAL)

    @gluon.jit(do_not_specialize=["tokens", "tiles"])
    def _streamed_rows(
        x, weight, scales, bias, residual, out, outputs, tokens, tiles, scale_stride, out_stride, residual_stride,
        GATE: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, GROUPS: gl.constexpr,
        STAGES: gl.constexpr, AHEAD: gl.constexpr, TURNS: gl.constexpr, PARTS: gl.constexpr, X: gl.constexpr,
        CODES: gl.constexpr,
    ):  # fmt: skip
        gdc_launch_dependents()
        x_parts = gl.allocate_shared_memory(x.dtype, [PARTS, x.block_type.shape[0], 16, 64], x.layout)
        code_stages = gl.allocate_shared_memory(weight.dtype, [STAGES, GROUPS, 64, 64], weight.layout)
        slots = gl.allocate_shared_memory(gl.float32, [2 * GROUPS, 16, 64], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        x_ready = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
        summed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        # Few barriers: each costs a wait of all warps here.
        for place in gl.static_range(STAGES):
            mbarrier.init(ready.index(place), count=1)
            mbarrier.init(empty.index(place), count=GROUPS)
        for part in gl.static_range(PARTS):
            mbarrier.init(x_ready.index(part), count=1)
        mbarrier.init(summed, count=GROUPS)
        memory = (x_parts, code_stages, slots, ready, empty, x_ready, summed)
        given = (scales, bias, residual, out, outputs, tokens, tiles, scale_stride, out_stride, residual_stride)
        gl.warp_specialize(
            [
                (_multiply, (memory, given, 0, GATE, BIAS, RESIDUAL, GROUPS, STAGES, TURNS, PARTS, X, CODES)),
                (_multiply, (memory, given, 1, GATE, BIAS, RESIDUAL, GROUPS, STAGES, TURNS, PARTS, X, CODES)),
                (_multiply, (memory, given, 2, GATE, BIAS, RESIDUAL, GROUPS, STAGES, TURNS, PARTS, X, CODES)),
                (_multiply, (memory, given, 3, GATE, BIAS, RESIDUAL, GROUPS, STAGES, TURNS, PARTS, X, CODES)),
                (_load, (memory, x, weight, tiles, GROUPS, STAGES, AHEAD, TURNS, PARTS)),
            ],
            [4, 4, 4, 1],
            [112, 112, 112, 24],
        )  # fmt: skip


def streamed_rows(x: Tensor, weight: QuantisedWeight, fused: Fused = PRODUCT_ONLY) -> Tensor:
    """Return the linear layer of [rows, columns] with an int8 weight."""
    _, _, bias, gate_block, residual = fused
    data, scales, tokens = weight.data, weight.scales, fused.normalised(x)
    outputs = len(data) // 2 if gate_block else len(data)
    tiles, chunks = -(-len(data) // _OUTPUTS), x.shape[1] // 64
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    _streamed_rows[(min(tiles, hopper_processors(x.device)),)](
        described_blocks(tokens, [chunks // _PARTS, _ROWS]), described_blocks(data, [_GROUPS, _OUTPUTS]), scales,
        x if bias is None else bias, x if residual is None else residual, out, outputs, len(x), tiles,
        scales.stride(0), out.stride(0), 0 if residual is None else residual.stride(0),
        GATE=gate_block > 0, BIAS=bias is not None, RESIDUAL=residual is not None,
        GROUPS=_GROUPS, STAGES=_STAGES, AHEAD=_AHEAD, TURNS=data.shape[1] // (_COLUMNS * _GROUPS), PARTS=_PARTS,
        X=layout_of_blocks(tokens, 2), CODES=layout_of_blocks(data, 2), num_warps=4, maxnreg=96, **launch_options(True),
    )  # fmt: skip
    return out


def fits_streamed_rows(x: Tensor, weight: QuantisedWeight, gate_block: int) -> bool:
    """Return whether the kernel takes these: 9 to 16 aligned rows of bf16 that fit in shared memory, on Hopper.

    The number of columns must be a power of two, as the sizes of a tensor copy are.
    """
    if gluon is None or weight.kind != "int8" or not 8 < len(x) <= _ROWS or not hopper_processors(x.device):
        return False
    return (
        x.dtype == torch.bfloat16
        and gate_block in (0, _GATE)
        and x.shape[1] <= _MOST_COLUMNS
        and x.shape[1].bit_count() == 1
        and weight.data.shape[1] >= _COLUMNS * _GROUPS * _PARTS
        and is_aligned(x)
        and is_aligned(weight.data)
    )
