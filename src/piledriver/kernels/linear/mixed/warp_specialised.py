# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# mypy: disable-error-code="assignment"
# ruff: noqa: N803, N806
"""Linear layers of many rows with int8 or int4 weights on Hopper: one warp loads, eight convert and multiply.

As many programs as processors walk over tiles of 128 outputs by up to 320 tokens. One warp of a program streams codes
of the weight and tiles of the input to shared memory, also those of the next tile. Two groups of four warps turn 64
outputs each into sums (`stage_sums`), and store those (`tile_outputs`). Where the last tiles would leave processors
idle, all programs share their columns (`division`; stream-K, Osama et al., 2023).

The kernel is written in Gluon, the language below Triton, with layouts and barriers of its own: Triton's pipeline waits
for matrix instructions whose left operand was converted in registers before it converts the next.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.mixed.division import OUTPUTS, UNROLLED, divide, tokens_of_tile
from piledriver.kernels.linear.mixed.hopper import described_blocks, hopper_processors, is_aligned
from piledriver.kernels.linear.mixed.narrow_instructions import NarrowKernel
from piledriver.kernels.linear.workspace import workspace
from piledriver.kernels.quantised_weight import GROUP, QuantisedWeight

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    gluon = None

_BYTES = 64
"""Codes of a row in a block, in bytes: a group of int4, 64 columns of int8."""
_WIDE = {"int4": 256, "int8": 128}
"""Tokens of a tile up to which a stage has 128 columns. With more, too few such stages fit, or registers; then 64."""
_SHARED_BYTES, _MOST_STAGES = 226 * 1024, 8
"""Shared memory of a program, and how many stages are of use."""
_ALTERNATING = {
    "int4": {*range(96, 113), *range(136, 289)},
    "int8": {*range(104, 113), *range(136, 193), *range(257, 321)},
}
"""Tokens of tiles in which the groups alternate: in others that is slower (H200)."""

if gluon is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.linear.mixed.hopper import async_load, reinterpret
    from piledriver.kernels.linear.mixed.stage_sums import (
        layout_of_operand,
        place_of_codes,
        places_of_codes,
        stage_sums,
    )
    from piledriver.kernels.linear.mixed.tile_outputs import add_shares, keep_share, rows_of_sums, store_tile
    from piledriver.kernels.linear.mixed.token_tiles import (
        allocate_tokens,
        layout_of_tokens,
        load_tokens,
        loads_of,
        room_of,
    )
    from piledriver.kernels.linear.products import quotient, tile_of

    @gluon.jit
    def _own_share(work):
        """Return which share of the late tiles is this program's, its first pair of columns, the one after its last.

        Programs take shares from the last to the first, so that a program that adds shares waits for programs that
        began before it. Programs without a share have a negative number and no columns.
        """
        _, late, share, takers, pairs, _, _ = work
        own = takers - 1 - gl.program_id(0)
        return own, gl.maximum(own, 0) * share, gl.minimum((own + 1) * share, late * pairs)

    @gluon.jit
    def _tiles(work):
        """Return how many whole tiles this program computes."""
        return quotient(work[0] - gl.program_id(0) + gl.num_programs(0) - 1, gl.num_programs(0))

    @gluon.jit
    def _items(work):
        """Return how many items of work this program has: whole tiles, then one or two tiles of its share."""
        _, begin, end = _own_share(work)
        pairs = work[4]
        return _tiles(work) + gl.maximum(quotient(end + pairs - 1, pairs) - quotient(begin, pairs), 0)

    @gluon.jit
    def _item(work, item):
        """Return an item of this program: the tile, its place, the first pair of columns, the one after the last."""
        whole, _, _, _, pairs, tiles, across = work
        tile, begin, end = gl.program_id(0) + item * gl.num_programs(0), 0, pairs
        if item >= _tiles(work):
            _, first, last = _own_share(work)
            late = quotient(first, pairs) + item - _tiles(work)
            tile, begin = whole + late, gl.maximum(first - late * pairs, 0)
            end = gl.minimum(last - late * pairs, pairs)
        row, column = tile_of(tile, tiles, across, 8)
        return tile, row, column, begin, end

    @gluon.jit
    def _first_token(column, tokens, BM: gl.constexpr):
        """Return the first token of a tile. The last tile begins earlier: loads beyond the last token are slow."""
        return gl.minimum(column * BM, gl.maximum(tokens - BM, 0))

    @gluon.jit
    def _load_codes(memory, weight, row, stage, turn, barrier, tokens, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
                    SHARING: gl.constexpr):  # fmt: skip
        """Load the codes of a stage, unless it shares those of the one before. Its barrier expects the tokens too."""
        _, codes, ready, _, _ = memory
        if stage % SHARING == 0:
            shape: gl.constexpr = [places_of_codes(STAGES, SHARING), BLOCKS, 128, 64]
            place = reinterpret(codes, weight.dtype, shape, weight.layout).index(place_of_codes(turn, STAGES, SHARING))
            mbarrier.expect(ready.index(barrier), weight.block_type.nbytes + tokens)
            async_load(weight, [stage // SHARING * BLOCKS, row, 0], ready.index(barrier), place)
        else:
            mbarrier.expect(ready.index(barrier), tokens)

    @gluon.jit
    def _load_first(memory, inputs, weight, work, tokens, BM: gl.constexpr, BLOCKS: gl.constexpr, HALVES: gl.constexpr,
                    STAGES: gl.constexpr, SHARING: gl.constexpr):  # fmt: skip
        """Load the first stage. Only its tokens may come from the kernel before."""
        x_tiles, _, ready, _, _ = memory
        _, row, column, begin, _ = _item(work, 0)
        stage = begin * (2 // HALVES)
        # One stage of codes: more would delay the first tokens.
        _load_codes(memory, weight, row * 128, stage, 0, STAGES, 0, BLOCKS, STAGES, SHARING)
        gdc_wait()
        token = _first_token(column, tokens, BM)
        for half in gl.static_range(HALVES):
            barrier = ready.index(0 if half == HALVES - 1 else STAGES + 1)
            mbarrier.expect(barrier, BM * 128)
            load_tokens(x_tiles, half, inputs, token, (stage * HALVES + half) * 64, barrier, BM)

    @gluon.jit
    def _load(memory, inputs, weight, work, tokens, BM: gl.constexpr, BLOCKS: gl.constexpr, HALVES: gl.constexpr,
              STAGES: gl.constexpr, SHARING: gl.constexpr):  # fmt: skip
        """Load all stages but the first, each as soon as both groups of warps are done with what its place held."""
        x_tiles, _, ready, empty, _ = memory
        EACH: gl.constexpr = 2 // HALVES
        # `_load_first` has waited, but in other warps.
        gdc_wait()
        turn = 0
        for item in range(_items(work)):
            row, column, begin, end = _item(work, item)[1:]
            token = _first_token(column, tokens, BM)
            for stage in range(begin * EACH, end * EACH):
                place = turn % STAGES
                if turn > 0:
                    mbarrier.wait(empty.index(place), (turn // STAGES & 1) ^ 1)
                    _load_codes(memory, weight, row * 128, stage, turn, place, BM * 128 * HALVES, BLOCKS,
                                STAGES, SHARING)  # fmt: skip
                    for half in gl.static_range(HALVES):
                        load_tokens(x_tiles, place * HALVES + half, inputs, token, (stage * HALVES + half) * 64,
                                    ready.index(place), BM)  # fmt: skip
                turn += 1

    @gluon.jit
    def _multiply(memory, lines, given, work, SIDE: gl.constexpr, INT4: gl.constexpr, BIAS: gl.constexpr,
                  RESIDUAL: gl.constexpr, BM: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
                  SHARING: gl.constexpr, UNROLL: gl.constexpr, CHUNK: gl.constexpr,
                  ALTERNATE: gl.constexpr):  # fmt: skip
        """Compute and store 64 outputs of each tile, from `SIDE` * 64 on."""
        scales, _, _, _, partial, counters, outputs, tokens, scale_stride, _, _ = given
        whole, _, share, _, pairs, _, _ = work
        own, _, _ = _own_share(work)
        partial += (gl.program_id(0) * 2 + SIDE).to(gl.int64) * (64 * BM)
        turn = 0
        for item in range(_items(work)):
            tile, row, column, begin, end = _item(work, item)
            first = row * 128 + SIDE * 64
            # Outputs beyond the last read the last, and are not stored.
            rows = gl.minimum(first + gl.arange(0, 64, gl.SliceLayout(1, layout_of_operand(BM))), outputs - 1)
            turns = (end - begin) * (2 // HALVES)
            # Of int8 they are needed at the end, but come from memory.
            scale = 0 if INT4 else gl.load(scales + rows_of_sums(first, outputs, BM) * scale_stride)
            totals = stage_sums(memory, scales + rows * scale_stride + (begin if INT4 else 0), turn, turns, SIDE, INT4,
                                BM, HALVES, STAGES, SHARING, UNROLL, ALTERNATE)  # fmt: skip
            turn += turns
            # A program computes the first columns of a tile last, when others have computed the rest, and adds all.
            # If shares divide tiles evenly, all end together: the first share adds one side, the last the other. These
            # wait for each other, but they are of neighbouring programs, which run at the same time.
            head = quotient((tile - whole) * pairs, share)
            tail = quotient((tile - whole + 1) * pairs - 1, share)
            adds = tail if (SIDE == 1) & (quotient(pairs, share) * share == pairs) else head
            counter = counters + (tile - whole) * 2 + SIDE
            if (end - begin < pairs) & (own != adds):
                keep_share(totals, partial, counter, BM)
            else:
                if end - begin < pairs:
                    totals = add_shares(totals, partial + (own - head) * (128 * BM), 128 * BM, counter, own - head,
                                        tail - head + 1, BM)  # fmt: skip
                token = _first_token(column, tokens, BM)
                store_tile(totals, scale, lines.index(SIDE), given, first, token, column * BM - token, INT4, BIAS,
                           RESIDUAL, BM, CHUNK)  # fmt: skip

    def _name(specialised):
        """Return the name of the compiled kernel, with the tokens of its matrix instructions."""
        return f"warp_specialised_{specialised.constants['BM']}"

    _SIZES = ["tokens", "whole", "late", "share", "takers", "tiles", "across"]

    @functools.partial(NarrowKernel, repr=_name, do_not_specialize=_SIZES)
    def _warp_specialised(
        x0, x1, x2, x3, weight, scales, bias, residual, out, partial, counters, outputs, tokens, whole, late, share,
        takers, pairs, tiles, across, scale_stride, out_stride, residual_stride,
        INT4: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, BM: gl.constexpr, BLOCKS: gl.constexpr,
        HALVES: gl.constexpr, STAGES: gl.constexpr, SHARING: gl.constexpr, UNROLL: gl.constexpr, CHUNK: gl.constexpr,
        ALTERNATE: gl.constexpr,
    ):  # fmt: skip
        gdc_launch_dependents()
        inputs = (x0, x1, x2, x3)
        x_tiles = allocate_tokens(STAGES * HALVES, BM)
        codes = gl.allocate_shared_memory(weight.dtype, [places_of_codes(STAGES, SHARING) * BLOCKS, 128, 64],
                                           gl.NVMMASharedLayout(64, 8, 2))  # fmt: skip
        lines = gl.allocate_shared_memory(gl.bfloat16, [2, CHUNK, 64], gl.NVMMASharedLayout(128, 16, 2))
        ready = gl.allocate_shared_memory(gl.int64, [STAGES + HALVES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        begun = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        memory = (x_tiles, codes, ready, empty, begun)
        work = (whole, late, share, takers, pairs, tiles, across)
        given = (scales, bias, residual, out, partial, counters, outputs, tokens, scale_stride, out_stride,
                 residual_stride)  # fmt: skip
        for place in gl.static_range(STAGES + HALVES):
            mbarrier.init(ready.index(place), count=1)
        # Before the warps part, which takes a while.
        _load_first(memory, inputs, weight, work, tokens, BM, BLOCKS, HALVES, STAGES, SHARING)
        for place in gl.static_range(STAGES):
            mbarrier.init(empty.index(place), count=2)
        if ALTERNATE:
            for side in gl.static_range(2):
                mbarrier.init(begun.index(side), count=1)
        gl.warp_specialize(
            [
                (_multiply, (memory, lines, given, work, 0, INT4, BIAS, RESIDUAL, BM, HALVES, STAGES, SHARING, UNROLL,
                             CHUNK, ALTERNATE)),
                (_multiply, (memory, lines, given, work, 1, INT4, BIAS, RESIDUAL, BM, HALVES, STAGES, SHARING, UNROLL,
                             CHUNK, ALTERNATE)),
                (_load, (memory, inputs, weight, work, tokens, BM, BLOCKS, HALVES, STAGES, SHARING)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


def warp_specialised(
    x: Tensor,
    weight: QuantisedWeight,
    fused: Fused = PRODUCT_ONLY,
    *,
    config: dict[str, int] | None = None,
) -> Tensor:
    """Return the linear layer of [rows, columns] with an int8 or int4 weight, without a gate.

    `config` may have the tokens of a tile (`bm`).
    """
    _, _, bias, _, residual = fused
    data, scales, processors, pairs = weight.data, weight.scales, hopper_processors(x.device), x.shape[1] // GROUP
    bm = config["bm"] if config else tokens_of_tile(len(x), len(data), pairs, processors)
    work = divide(len(x), len(data), pairs, bm, processors)
    partial, counters = workspace(x.device, max(work.takers * OUTPUTS * bm, 1), 2 * work.late)
    out = torch.empty(len(x), len(data), dtype=x.dtype, device=x.device)
    rows = fused.normalised(x)
    int4 = weight.kind == "int4"
    halves = 2 if bm <= _WIDE[weight.kind] else 1
    blocks = 1 if int4 else halves
    # Outputs of `chunk` tokens at a time are transposed; large tiles of int4 leave room for 32.
    chunk = 32 if int4 and bm > 128 else 64
    # int4 has codes of 128 columns: stages of 64 share them in twos.
    sharing = 2 if int4 and halves == 1 else 1
    code_bytes, token_bytes, room = OUTPUTS * _BYTES * blocks, room_of(bm) * halves, _SHARED_BYTES - 2 * OUTPUTS * chunk
    counts = range(2, _MOST_STAGES + 1)
    stages = max(n for n in counts if n * token_bytes + places_of_codes(n, sharing) * code_bytes <= room)
    loads = [_described_tokens(rows, tokens) for tokens in loads_of(bm)]
    x0, x1, x2, x3 = (loads + 3 * loads[-1:])[:4]
    _warp_specialised[(min(max(work.whole, work.takers), processors),)](
        x0, x1, x2, x3, described_blocks(data, [blocks, OUTPUTS]), scales, x if bias is None else bias,
        x if residual is None else residual, out, partial, counters, len(data), len(x), work.whole, work.late,
        work.share, work.takers, pairs, work.tiles, work.across, scales.stride(0), out.stride(0),
        0 if residual is None else residual.stride(0),
        INT4=int4, BIAS=bias is not None, RESIDUAL=residual is not None, BM=bm, BLOCKS=blocks, HALVES=halves,
        STAGES=stages, SHARING=sharing, UNROLL=(1 if pairs % UNROLLED else UNROLLED) * (2 // halves), CHUNK=chunk,
        ALTERNATE=bm in _ALTERNATING[weight.kind], num_warps=4, maxnreg=168, **launch_options(True),
    )  # fmt: skip
    return out


def fits_warp_specialised(x: Tensor, weight: QuantisedWeight, residual: Tensor | None) -> bool:
    """Return whether the kernel takes these: bf16 in aligned rows, columns in pairs of 64, on Hopper."""
    if gluon is None or not hopper_processors(x.device) or weight.shape[0] % 8 or weight.shape[1] % GROUP:
        return False
    tokens = [x] if residual is None else [x, residual]
    scaled = [weight.scales] if weight.kind == "int4" else []
    return all(one.dtype == torch.bfloat16 for one in tokens + scaled) and all(map(is_aligned, [*tokens, weight.data]))


def _described_tokens(rows: Tensor, count: int) -> TensorDescriptor:
    """Return the descriptor of 64 columns of `count` tokens."""
    return TensorDescriptor.from_tensor(rows, [count, 64], layout_of_tokens())
