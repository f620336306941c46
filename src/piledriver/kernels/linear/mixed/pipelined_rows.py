# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# mypy: disable-error-code="misc,name-defined,assignment"
# ruff: noqa: N803, N806
"""Linear layers of 2 to 16 rows with int4 weights: the input stays in registers, the weight streams past.

As many programs as processors walk over tiles of 16 outputs (`row_products`). One warp copies codes to shared memory, a
tile ahead of two groups of four warps, which divide the columns. Sums of the warps meet in shared memory, where the
groups take turns to add them up. Their order depends on the weight and on whether there are more than 8 rows.

In `rows`, codes go from memory to registers. That is faster with few columns, where barriers and copies cost more.

The kernel is written in Gluon, the language below Triton, for its warps of different work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.mixed.hopper import described_blocks, hopper_processors
from piledriver.kernels.linear.mixed.row_products import BYTES, MOST_ROWS, OUTPUTS, WARPS, fits_rows
from piledriver.kernels.quantised_weight import QuantisedWeight

try:
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier
except ImportError:
    gluon = None

_CHUNKS = (1, 2, 4)
"""Chunks of an output that a warp may take: with more, the input would not fit in registers."""
_STAGES, _SLOTS = 2, 4
"""Tiles of codes and of sums in shared memory. With more stages, copies of later tiles delay earlier ones."""

if gluon is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.linear.mixed.hopper import async_load, reinterpret
    from piledriver.kernels.linear.mixed.row_products import code_layout, load_input, load_scales, tile_sums
    from piledriver.kernels.linear.mixed.rows import store_outputs

    @gluon.jit
    def _first_row(turn, GATE: gl.constexpr):
        """Return the first of the 16 rows of the weight that a program takes in a turn: with a gate, gate then up."""
        if GATE > 0:
            at = (gl.program_id(0) + turn // 2 * gl.num_programs(0)) * 16
            return at // GATE * (2 * GATE) + at % GATE + turn % 2 * GATE
        else:
            return (gl.program_id(0) + turn * gl.num_programs(0)) * 16

    @gluon.jit
    def _load_tile(memory, weight, turn, GATE: gl.constexpr, STAGES: gl.constexpr):
        """Load the codes of a tile."""
        codes, _, ready, _, _ = memory
        place = turn % STAGES
        mbarrier.expect(ready.index(place), weight.block_type.nbytes)
        async_load(weight, [0, _first_row(turn, GATE), 0], ready.index(place), codes.index(place))

    @gluon.jit
    def _load(memory, weight, turns, GATE: gl.constexpr, STAGES: gl.constexpr):
        """Load the codes of all tiles but the first, each as soon as both groups are done with what its place held."""
        _, _, _, empty, _ = memory
        for turn in range(1, turns):
            if turn >= STAGES:
                mbarrier.wait(empty.index(turn % STAGES), (turn // STAGES & 1) ^ 1)
            _load_tile(memory, weight, turn, GATE, STAGES)

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
        weight_rows = outputs * (2 if GATE > 0 else 1)
        codes = reinterpret(code_stages, gl.int32, [STAGES * 2, 4, CHUNKS, 16, 16], gl.NVMMASharedLayout(64, 32, 4))
        sums = reinterpret(slots, gl.float32, [SLOTS * 2, 4, ROWS, 16], gl.SwizzledSharedLayout(8, 2, 2, [2, 1, 0]))
        factor = load_scales(scales, _first_row(0, GATE), weight_rows, scale_stride, GROUP * 4, 4, CHUNKS)
        gdc_wait()
        pieces = load_input(x, tokens, x_stride, GROUP * 4, 4, CHUNKS, ROWS)
        for turn in range(turns):
            place = turn % STAGES
            following = load_scales(
                scales, _first_row(turn + 1, GATE), weight_rows, scale_stride, GROUP * 4, 4, CHUNKS
            )  # fmt: skip
            mbarrier.wait(ready.index(place), turn // STAGES & 1)
            some = codes.index(place * 2 + GROUP).load(code_layout(4, CHUNKS))
            tl.debug_barrier()
            mbarrier.arrive(empty.index(place))
            total = tile_sums(some, pieces, factor, 4, CHUNKS, ROWS)
            factor = following
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

    @gluon.jit(do_not_specialize=["tokens", "each", "more"])
    def _pipelined_rows(
        x, weight, scales, bias, residual, out, outputs, tokens, each, more, x_stride, scale_stride, out_stride,
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
        memory = (codes, slots, ready, empty, summed)
        given = (scales, bias, residual, out, outputs, tokens, scale_stride, out_stride, residual_stride)
        for place in gl.static_range(STAGES):
            mbarrier.init(ready.index(place), count=1)
        # Before the warps part, which takes a while.
        _load_tile(memory, weight, 0, GATE, STAGES)
        for place in gl.static_range(STAGES):
            mbarrier.init(empty.index(place), count=2)
        mbarrier.init(summed, count=2)
        # All programs have `each` tiles, the first `more` of them another: a division here would delay the input.
        turns = (each + (gl.program_id(0) < more).to(gl.int32)) * (2 if GATE > 0 else 1)
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
    tiles, chunks = -(-outputs // OUTPUTS), data.shape[1] // BYTES
    programs = min(tiles, hopper_processors(x.device))
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    _pipelined_rows[(programs,)](
        words, described_blocks(data, [chunks, OUTPUTS]), scales, x if bias is None else bias,
        x if residual is None else residual, out, outputs, len(x), tiles // programs, tiles % programs, words.stride(0),
        scales.stride(0), out.stride(0), 0 if residual is None else residual.stride(0),
        GATE=gate_block, BIAS=bias is not None, RESIDUAL=residual is not None, ROWS=8 if len(x) <= 8 else MOST_ROWS,
        CHUNKS=chunks // WARPS, STAGES=_STAGES, SLOTS=_SLOTS, num_warps=4, maxnreg=168,
        **launch_options(True),
    )  # fmt: skip
    return out


def fits_pipelined_rows(x: Tensor, weight: QuantisedWeight, gate_block: int) -> bool:
    """Return whether the kernel takes these: at most 16 rows of bf16 that fit in registers, on Hopper."""
    width = weight.data.shape[1]
    fits = width in [chunks * WARPS * BYTES for chunks in _CHUNKS] and gate_block % OUTPUTS == 0
    return fits and fits_rows(x, weight)
