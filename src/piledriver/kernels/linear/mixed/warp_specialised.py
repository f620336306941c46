# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# mypy: disable-error-code="assignment"
# ruff: noqa: N803, N806, RUF005, SIM102, SIM300
"""Linear layers of many rows with int8 or int4 weights on Hopper: one warp loads, eight convert and multiply.

As many programs as processors walk over tiles of 128 outputs by up to 256 tokens. The ninth warp of a program streams
codes of the weight and tiles of the input to shared memory, also those of the next tile. Two groups of four warps take
64 outputs each: codes become bf16 in registers while the matrix instructions of the half before are in flight, and a
stage is handed back as soon as both groups have multiplied it. Where the last tiles would leave most processors idle,
several programs divide the columns of each.

The kernel is written in Gluon, the language below Triton, with layouts and barriers of its own: Triton's pipeline waits
for matrix instructions whose left operand was converted in registers before it converts the next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.mixed.division import OUTPUTS, divide, pieces, tokens_of_tile
from piledriver.kernels.linear.mixed.hopper import hopper_processors, is_aligned
from piledriver.kernels.linear.weights import GROUP, QuantisedWeight
from piledriver.kernels.linear.workspace import workspace

try:
    import triton.language as tl
    from triton import constexpr_function
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    gluon = None

_BYTES = 64
"""Codes of a row that a stage holds, in bytes: a group of int4, 64 columns of int8."""
_SHARED_BYTES, _MOST_STAGES = 226 * 1024, 8
"""Shared memory for the stages of a program, and how many stages are of use."""
_UNROLLED = 4
"""Pairs of 64 columns after which a group of warps waits for its matrix instructions, if their number allows it."""

if gluon is not None:
    from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.linear.mixed.conversions import from_int4, from_int8, times
    from piledriver.kernels.linear.mixed.hopper import async_load
    from piledriver.kernels.linear.products import tile_of

    @constexpr_function
    def _piece(BM, PIECE):
        """Return the tokens of a piece of a tile, which loads and matrix instructions take at once: a power of two."""
        first = 1 << (BM.bit_length() - 1)
        return BM - first if PIECE else first

    @constexpr_function
    def _layout_of_sums(BM):
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])

    @gluon.jit
    def _item(work, item):
        """Return an item of work: its tile, the tile's place, its first pair of 64 columns, the one after its last.

        The first items are `whole` tiles, the others `parts` for each further tile.
        """
        whole, _, part, parts, pairs, tiles, across = work
        tile, begin, end = item, 0, pairs
        if item >= whole:
            tile, begin = whole + (item - whole) // parts, (item - whole) % parts * part
            end = gl.minimum(begin + part, pairs)
        row, column = tile_of(tile, tiles, across, 8)
        return tile, row, column, begin, end

    @gluon.jit
    def _load_codes(memory, weight, row, stage, turn, INT4: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr):
        """Load the codes of a stage, and expect its tokens too."""
        _, codes, ready, _ = memory
        barrier = ready.index(turn % STAGES)
        mbarrier.expect(barrier, weight.block_type.nbytes + BM * (256 if INT4 else 128))
        async_load(weight, [row, stage * 64], barrier, codes.index(turn % STAGES))

    @gluon.jit
    def _load(memory, inputs, weight, work, INT4: gl.constexpr, BM: gl.constexpr, PIECES: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
        """Load all stages in turn, each as soon as both groups of warps are done with what its place held.

        Only the tokens may come from the kernel before.
        """
        x_tiles, _, ready, empty = memory
        HALVES: gl.constexpr = 2 if INT4 else 1
        EACH: gl.constexpr = 1 if INT4 else 2
        _, row, _, begin, end = _item(work, gl.program_id(0))
        ahead = gl.minimum((end - begin) * EACH, STAGES)
        for turn in range(ahead):
            _load_codes(memory, weight, row * 128, begin * EACH + turn, turn, INT4, BM, STAGES)
        gdc_wait()
        turn = 0
        for item in range(gl.program_id(0), work[1], gl.num_programs(0)):
            _, row, column, begin, end = _item(work, item)
            for stage in range(begin * EACH, end * EACH):
                place = turn % STAGES
                if turn >= ahead:
                    mbarrier.wait(empty.index(place), (turn // STAGES & 1) ^ 1)
                    _load_codes(memory, weight, row * 128, stage, turn, INT4, BM, STAGES)
                for half in gl.static_range(HALVES):
                    for piece in gl.static_range(PIECES):
                        at = [column * BM + piece * _piece(BM, 0), (stage * HALVES + half) * 64]
                        async_load(inputs[piece], at, ready.index(place), x_tiles[piece].index(place * HALVES + half))
                turn += 1

    @gluon.jit
    def _turn(first, pair, HALF: gl.constexpr, INT4: gl.constexpr):
        """Return the turn that loads half a pair of 64 columns: int4 has both halves of a group in one, int8 in two."""
        if INT4:
            return first + pair
        else:
            return first + pair * 2 + HALF

    @gluon.jit
    def _numbers(memory, scale, turn, SIDE: gl.constexpr, HALF: gl.constexpr, INT4: gl.constexpr, STAGES: gl.constexpr,
                 OPERAND: gl.constexpr):  # fmt: skip
        """Return 64 outputs by 64 columns of the weight in bf16, as left operand of a matrix instruction."""
        _, codes, ready, _ = memory
        mbarrier.wait(ready.index(turn % STAGES), turn // STAGES & 1)
        some = codes.index(turn % STAGES).slice(SIDE * 64, 64).load(OPERAND)
        if INT4:
            both = from_int4(some, some, True)
            return times(both[HALF], gl.expand_dims(scale, 1).broadcast_to(some.shape), True)
        else:
            return from_int8(some, some, True)

    @gluon.jit
    def _add_product(totals, numbers, memory, turn, HALF: gl.constexpr, INT4: gl.constexpr, PIECES: gl.constexpr,
                     STAGES: gl.constexpr):  # fmt: skip
        """Begin to add the product of a left operand and 64 columns of the tokens, a group of instructions a piece."""
        x_tiles, _, _, _ = memory
        place = turn % STAGES * 2 + HALF if INT4 else turn % STAGES
        found = ()
        for piece in gl.static_range(PIECES):
            tokens = x_tiles[piece].index(place).permute((1, 0))
            found = found + (warpgroup_mma(numbers, tokens, totals[piece], is_async=True),)
        return found

    @gluon.jit
    def _hand_back(memory, turn, STAGES: gl.constexpr):
        _, _, _, empty = memory
        tl.debug_barrier()
        mbarrier.arrive(empty.index(turn % STAGES))

    @gluon.jit
    def _sums(memory, scales, first, pairs, SIDE: gl.constexpr, INT4: gl.constexpr, BM: gl.constexpr,
              PIECES: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr, OPERAND: gl.constexpr):  # fmt: skip
        """Return [64, tokens] of each piece of a tile: outputs of a group of warps times tokens.

        `scales` are those of the first columns, `first` is the turn that loads them. One half is converted while the
        other is multiplied; only at the end of `UNROLL` pairs are no matrix instructions in flight.
        """
        totals = ()
        for piece in gl.static_range(PIECES):
            totals = totals + (gl.zeros([64, _piece(BM, piece)], gl.float32, _layout_of_sums(_piece(BM, piece))),)
        scale = gl.load(scales)
        low = _numbers(memory, scale, first, SIDE, 0, INT4, STAGES, OPERAND)
        for begin in range(0, pairs, UNROLL):
            high = low
            for step in gl.static_range(UNROLL):
                pair = begin + step
                following = gl.load(scales + gl.minimum(pair + 1, pairs - 1)) if INT4 else scale
                one, two = _turn(first, pair, 0, INT4), _turn(first, pair, 1, INT4)
                totals = _add_product(totals, low, memory, one, 0, INT4, PIECES, STAGES)
                # Matrix instructions read registers until they have ended.
                if step > 0:
                    high = warpgroup_mma_wait(PIECES, deps=(high,))
                    _hand_back(memory, _turn(first, pair - 1, 1, INT4), STAGES)
                high = _numbers(memory, scale, two, SIDE, 1, INT4, STAGES, OPERAND)
                totals = _add_product(totals, high, memory, two, 1, INT4, PIECES, STAGES)
                low = warpgroup_mma_wait(PIECES, deps=(low,))
                if not INT4:
                    _hand_back(memory, one, STAGES)
                next_low = low
                if pair + 1 < pairs:
                    next_low = _numbers(memory, following, _turn(first, pair + 1, 0, INT4), SIDE, 0, INT4, STAGES,
                                        OPERAND)  # fmt: skip
                low, scale = next_low, following
            totals = warpgroup_mma_wait(0, deps=totals + (high,))[:PIECES]
            _hand_back(memory, _turn(first, begin + UNROLL - 1, 1, INT4), STAGES)
        return totals

    @gluon.jit
    def _add_earlier(total, partial, counter, begin, end, pairs, BM: gl.constexpr):
        """Add the sums of the columns before, and store the result unless these columns are the last.

        Parts of a tile are added in order of columns. The counter has the pairs that have been added so far; a program
        waits only for programs before it, which are running or done.
        """
        SUMS: gl.constexpr = _layout_of_sums(BM)
        rows, tokens = gl.arange(0, 64, gl.SliceLayout(1, SUMS)), gl.arange(0, BM, gl.SliceLayout(0, SUMS))
        place = partial + gl.expand_dims(rows, 1) * BM + gl.expand_dims(tokens, 0)
        if begin > 0:
            added = gl.atomic_add(counter, 0, sem="acquire")
            while added != begin:
                added = gl.atomic_add(counter, 0, sem="acquire")
            tl.debug_barrier()
            total += gl.load(place, cache_modifier=".cg")
        if end == pairs:
            gl.store(counter, 0)
        else:
            gl.store(place, total)
            tl.debug_barrier()
            gl.atomic_add(counter, end - begin, sem="release")
        return total

    @gluon.jit
    def _transposed(numbers):
        """Transpose blocks of 8 by 8, of which each lane of a warp holds two neighbours."""
        return gl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [numbers], dtype=gl.bfloat16, is_pure=True, pack=2
        )

    @gluon.jit
    def _finish(total, given, first, token, INT4: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
                BM: gl.constexpr):  # fmt: skip
        """Apply the epilogue to sums of outputs from `first` on and store them, two outputs a lane."""
        if BM > 32:
            # A part at a time: addresses of all would not fit into registers.
            HALF: gl.constexpr = _layout_of_sums(BM // 2)
            left, right = gl.split(gl.permute(gl.reshape(total, [64, 2, BM // 2]), [0, 2, 1]))
            left = gl.convert_layout(left, HALF, assert_trivial=True)
            right = gl.convert_layout(right, HALF, assert_trivial=True)
            _finish(left, given, first, token, INT4, BIAS, RESIDUAL, BM // 2)
            _finish(right, given, first, token + BM // 2, INT4, BIAS, RESIDUAL, BM // 2)
        else:
            scales, bias, residual, out, _, _, outputs, tokens, scale_stride, out_stride, residual_stride = given
            SUMS: gl.constexpr = _layout_of_sums(BM)
            row, column = gl.arange(0, 64, gl.SliceLayout(1, SUMS)), gl.arange(0, BM, gl.SliceLayout(0, SUMS))
            rows = gl.minimum(first + row, outputs - 1)
            if not INT4:
                total = total * gl.expand_dims(gl.load(scales + rows * scale_stride).to(gl.float32), 1)
            if BIAS:
                total = total + gl.expand_dims(gl.load(bias + rows).to(gl.float32), 1)
            index = gl.expand_dims(row // 8 * 8, 1) + gl.expand_dims(column % 8, 0)
            at = gl.expand_dims(row % 8, 1) + gl.expand_dims(column // 8 * 8, 0)
            inside = (index < outputs - first) & (at < tokens - token)
            if RESIDUAL:
                corner = residual + token.to(gl.int64) * residual_stride + first
                added = gl.load(corner + at * residual_stride + index, mask=inside, other=0.0)
                total = total + _transposed(added).to(gl.float32)
            corner = out + token.to(gl.int64) * out_stride + first
            gl.store(corner + at * out_stride + index, _transposed(total.to(gl.bfloat16)), mask=inside)

    @gluon.jit
    def _multiply(memory, given, work, SIDE: gl.constexpr, INT4: gl.constexpr, BIAS: gl.constexpr,
                  RESIDUAL: gl.constexpr, BM: gl.constexpr, PIECES: gl.constexpr, STAGES: gl.constexpr,
                  UNROLL: gl.constexpr):  # fmt: skip
        """Compute and store the outputs of a group of warps."""
        scales, _, _, _, partial, counters, outputs, _, scale_stride, _, _ = given
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, _layout_of_sums(_piece(BM, 0)), 2)
        whole, items, _, _, pairs, _, _ = work
        turn = 0
        for item in range(gl.program_id(0), items, gl.num_programs(0)):
            tile, row, column, begin, end = _item(work, item)
            first = row * 128 + SIDE * 64
            # Outputs beyond the last read the last, and are not stored.
            rows = gl.minimum(first + gl.arange(0, 64, gl.SliceLayout(1, OPERAND)), outputs - 1)
            totals = _sums(memory, scales + rows * scale_stride + (begin if INT4 else 0), turn, end - begin, SIDE, INT4,
                           BM, PIECES, STAGES, UNROLL, OPERAND)  # fmt: skip
            turn += (end - begin) * (1 if INT4 else 2)
            if PIECES == 1:
                if end - begin < pairs:
                    slot = (tile - whole) * 2 + SIDE
                    total = _add_earlier(totals[0], partial + slot.to(gl.int64) * (64 * BM), counters + slot, begin,
                                         end, pairs, BM)  # fmt: skip
                    totals = (total,)
            if end == pairs:
                for piece in gl.static_range(PIECES):
                    _finish(totals[piece], given, first, column * BM + piece * _piece(BM, 0), INT4, BIAS, RESIDUAL,
                            _piece(BM, piece))  # fmt: skip

    @gluon.jit(do_not_specialize=["tokens", "whole", "items", "part", "parts", "tiles", "across"])
    def _warp_specialised(
        x, further, weight, scales, bias, residual, out, partial, counters, outputs, tokens, whole, items, part, parts,
        pairs, tiles, across, scale_stride, out_stride, residual_stride,
        INT4: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
        UNROLL: gl.constexpr,
    ):  # fmt: skip
        gdc_launch_dependents()
        PIECES: gl.constexpr = 1 if BM == _piece(BM, 0) else 2
        inputs = (x, further)
        x_tiles = ()
        for piece in gl.static_range(PIECES):
            x_tiles = x_tiles + (gl.allocate_shared_memory(
                x.dtype, [STAGES * (2 if INT4 else 1), _piece(BM, piece), 64], inputs[piece].layout),)  # fmt: skip
        codes = gl.allocate_shared_memory(weight.dtype, [STAGES, 128, 64], weight.layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for place in gl.static_range(STAGES):
            mbarrier.init(ready.index(place), count=1)
            mbarrier.init(empty.index(place), count=2)
        memory, work = (x_tiles, codes, ready, empty), (whole, items, part, parts, pairs, tiles, across)
        given = (scales, bias, residual, out, partial, counters, outputs, tokens, scale_stride, out_stride,
                 residual_stride)  # fmt: skip
        gl.warp_specialize(
            [
                (_multiply, (memory, given, work, 0, INT4, BIAS, RESIDUAL, BM, PIECES, STAGES, UNROLL)),
                (_multiply, (memory, given, work, 1, INT4, BIAS, RESIDUAL, BM, PIECES, STAGES, UNROLL)),
                (_load, (memory, inputs, weight, work, INT4, BM, PIECES, STAGES)),
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
    first, rest = pieces(bm)
    work = divide(len(x), len(data), pairs, bm, processors)
    partial, counters = workspace(x.device, max(work.late * OUTPUTS * bm, 1), 2 * work.late)
    out = torch.empty(len(x), len(data), dtype=x.dtype, device=x.device)
    rows = fused.normalised(x)
    stage = OUTPUTS * _BYTES + bm * (256 if weight.kind == "int4" else 128)
    _warp_specialised[(min(work.items, processors),)](
        _described(rows, [first, 64]), _described(rows, [rest or first, 64]), _described(data, [OUTPUTS, _BYTES]),
        scales, x if bias is None else bias, x if residual is None else residual, out, partial, counters, len(data),
        len(x), work.whole, work.items, work.part, work.parts, pairs, work.tiles, work.across, scales.stride(0),
        out.stride(0), 0 if residual is None else residual.stride(0),
        INT4=weight.kind == "int4", BIAS=bias is not None, RESIDUAL=residual is not None,
        BM=bm, STAGES=min(_SHARED_BYTES // stage, _MOST_STAGES),
        UNROLL=1 if work.parts > 1 or pairs % _UNROLLED else _UNROLLED,
        num_warps=4, maxnreg=168, **launch_options(True),
    )  # fmt: skip
    return out


def fits_warp_specialised(x: Tensor, weight: QuantisedWeight, residual: Tensor | None) -> bool:
    """Return whether the kernel takes these: bf16 in aligned rows, columns in pairs of 64, on Hopper."""
    if gluon is None or not hopper_processors(x.device) or weight.shape[0] % 8 or weight.shape[1] % GROUP:
        return False
    tokens = [x] if residual is None else [x, residual]
    scaled = [weight.scales] if weight.kind == "int4" else []
    return all(one.dtype == torch.bfloat16 for one in tokens + scaled) and all(map(is_aligned, [*tokens, weight.data]))


def _described(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    kinds = {torch.bfloat16: gl.bfloat16, torch.int8: gl.int8, torch.uint8: gl.uint8}
    layout = gl.NVMMASharedLayout.get_default_for(box, kinds[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, box, layout)
