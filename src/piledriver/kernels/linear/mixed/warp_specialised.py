# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803, N806
"""Linear layers of many rows with int8 or int4 weights on Hopper: one warp loads, eight convert and multiply.

A program computes 128 outputs of up to 256 tokens. Its ninth warp streams codes of the weight and tiles of the input to
shared memory. Two groups of four warps take 64 outputs each: codes become bf16 in registers while the matrix
instructions of the half before are in flight, and a tile is handed back as soon as both groups have multiplied it.

The kernel is written in Gluon, the language below Triton, with layouts and barriers of its own: Triton's pipeline waits
for matrix instructions whose left operand was converted in registers before it converts the next.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options, processor_count, starts_early
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.weights import GROUP, QuantisedWeight
from piledriver.kernels.linear.workspace import workspace

try:
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    gluon = None

_OUTPUTS = 128
"""Outputs of a program: 64 for each of two groups of warps."""
_BYTES = 64
"""Codes of a row that a stage holds, in bytes: a group of int4, 64 columns of int8."""
_LEAST_COLUMNS = 2048
"""Columns of a part, where programs share a tile."""

if gluon is not None:
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.linear.mixed.conversions import from_int4, from_int8, times
    from piledriver.kernels.linear.products import tile_of
    from piledriver.kernels.linear.workspace import add_parts

    # Named otherwise before Triton 3.8.
    async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

    @gluon.jit
    def _load_codes(memory, x, weight, row, begin, stage, INT4: gl.constexpr, STAGES: gl.constexpr):
        """Load the codes of a stage, and expect its tokens too."""
        _, codes, ready, _ = memory
        barrier = ready.index(stage % STAGES)
        mbarrier.expect(barrier, weight.block_type.nbytes + (2 if INT4 else 1) * x.block_type.nbytes)
        async_load(weight, [row, (begin + stage) * 64], barrier, codes.index(stage % STAGES))

    @gluon.jit
    def _load(memory, x, weight, row, token, begin, stages, INT4: gl.constexpr, STAGES: gl.constexpr):
        """Load all stages in turn, each as soon as both groups of warps are done with what its place held.

        Only the tokens may come from the kernel before.
        """
        x_tiles, _, ready, empty = memory
        HALVES: gl.constexpr = 2 if INT4 else 1
        for stage in range(gl.minimum(stages, STAGES)):
            _load_codes(memory, x, weight, row, begin, stage, INT4, STAGES)
        gdc_wait()
        for stage in range(stages):
            place = stage % STAGES
            if stage >= STAGES:
                mbarrier.wait(empty.index(place), (stage // STAGES & 1) ^ 1)
                _load_codes(memory, x, weight, row, begin, stage, INT4, STAGES)
            for half in gl.static_range(HALVES):
                column = ((begin + stage) * HALVES + half) * 64
                async_load(x, [token, column], ready.index(place), x_tiles.index(place * HALVES + half))

    @gluon.jit
    def _stage(pair, HALF: gl.constexpr, INT4: gl.constexpr):
        """Return the stage of half a pair of 64 columns: int4 has both halves of a group in one, int8 one in each."""
        if INT4:
            return pair
        else:
            return pair * 2 + HALF

    @gluon.jit
    def _numbers(codes, ready, scale, pair, SIDE: gl.constexpr, HALF: gl.constexpr, INT4: gl.constexpr,
                 STAGES: gl.constexpr, OPERAND: gl.constexpr):  # fmt: skip
        """Return 64 outputs by 64 columns of the weight in bf16, as left operand of a matrix instruction."""
        stage = _stage(pair, HALF, INT4)
        mbarrier.wait(ready.index(stage % STAGES), stage // STAGES & 1)
        some = codes.index(stage % STAGES).slice(SIDE * 64, 64).load(OPERAND)
        if INT4:
            both = from_int4(some, some, True)
            return times(both[HALF], gl.expand_dims(scale, 1).broadcast_to(some.shape), True)
        else:
            return from_int8(some, some, True)

    @gluon.jit
    def _tokens(x_tiles, pair, HALF: gl.constexpr, INT4: gl.constexpr, STAGES: gl.constexpr):
        """Return 64 columns by the tokens of the program."""
        stage = _stage(pair, HALF, INT4) % STAGES
        return x_tiles.index(stage * 2 + HALF if INT4 else stage).permute((1, 0))

    @gluon.jit
    def _hand_back(empty, stage, STAGES: gl.constexpr):
        tl.debug_barrier()
        mbarrier.arrive(empty.index(stage % STAGES))

    @gluon.jit
    def _sums(memory, scales, pairs, SIDE: gl.constexpr, INT4: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
              SUMS: gl.constexpr, OPERAND: gl.constexpr):  # fmt: skip
        """Return [64, BM]: outputs of a group of warps times tokens. `scales` are those of the first columns."""
        x_tiles, codes, ready, empty = memory
        total = gl.zeros([64, BM], gl.float32, SUMS)
        scale = gl.load(scales)
        low = _numbers(codes, ready, scale, 0, SIDE, 0, INT4, STAGES, OPERAND)
        for pair in range(pairs):
            following = gl.load(scales + gl.minimum(pair + 1, pairs - 1)) if INT4 else scale
            sums = warpgroup_mma(low, _tokens(x_tiles, pair, 0, INT4, STAGES), total, is_async=True)
            high = _numbers(codes, ready, scale, pair, SIDE, 1, INT4, STAGES, OPERAND)
            sums = warpgroup_mma(high, _tokens(x_tiles, pair, 1, INT4, STAGES), sums, is_async=True)
            # Matrix instructions read these registers until they have ended.
            low = warpgroup_mma_wait(1, deps=(low,))
            if not INT4:
                _hand_back(empty, pair * 2, STAGES)
            next_low = low
            if pair + 1 < pairs:
                next_low = _numbers(codes, ready, following, pair + 1, SIDE, 0, INT4, STAGES, OPERAND)
            total, high = warpgroup_mma_wait(0, deps=(sums, high))
            _hand_back(empty, _stage(pair, 1, INT4), STAGES)
            low, scale = next_low, following
        return total

    @gluon.jit
    def _add_parts(total, partial, counters, slot, piece, parts, BM: gl.constexpr, SUMS: gl.constexpr):
        """Store the sums of a part of the columns; return those of all parts, in order, and whether all were there."""
        rows, tokens = gl.arange(0, 64, gl.SliceLayout(1, SUMS)), gl.arange(0, BM, gl.SliceLayout(0, SUMS))
        first = partial + slot.to(gl.int64) * parts * (64 * BM)
        first += gl.expand_dims(rows, 1) * BM + gl.expand_dims(tokens, 0)
        gl.store(first + piece * (64 * BM), total)
        tl.debug_barrier()
        done = gl.atomic_add(counters + slot, 1, sem="acq_rel") == parts - 1
        if done:
            tl.debug_barrier()
            total = add_parts(first, 64 * BM, parts)
            gl.store(counters + slot, 0)
        return total, done

    @gluon.jit
    def _finish(total, way, arrived, scales, bias, residual, out, first, token, outputs, scale_stride,
                INT4: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, SUMS: gl.constexpr):  # fmt: skip
        """Apply the epilogue to sums of outputs from `first` on and store them, on their `way` in shared memory."""
        rows = gl.minimum(first + gl.arange(0, 64, gl.SliceLayout(1, SUMS)), outputs - 1)
        if not INT4:
            total = total * gl.expand_dims(gl.load(scales + rows * scale_stride).to(gl.float32), 1)
        if BIAS:
            total = total + gl.expand_dims(gl.load(bias + rows).to(gl.float32), 1)
        if RESIDUAL:
            mbarrier.expect(arrived, residual.block_type.nbytes)
            async_load(residual, [token, first], arrived, way)
            mbarrier.wait(arrived, 0)
            total = total + way.permute((1, 0)).load(SUMS).to(gl.float32)
            tl.debug_barrier()
        way.permute((1, 0)).store(total.to(gl.bfloat16))
        fence_async_shared()
        tl.debug_barrier()
        async_store(out, [token, first], way)
        tma.store_wait(0)

    @gluon.jit
    def _multiply(memory, arrived, scales, bias, residual, out, partial, counters, row, token, late, parts, begin,
                  stages, outputs, scale_stride, SIDE: gl.constexpr, INT4: gl.constexpr, BIAS: gl.constexpr,
                  RESIDUAL: gl.constexpr, SHARED: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
        """Compute and store the outputs of a group of warps."""
        x_tiles, _, _, empty = memory
        SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
        OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
        first = row + SIDE * 64
        # Outputs beyond the last read the last, and are not stored.
        rows = gl.minimum(first + gl.arange(0, 64, gl.SliceLayout(1, OPERAND)), outputs - 1)
        total = _sums(memory, scales + rows * scale_stride + (begin if INT4 else 0), stages if INT4 else stages // 2,
                      SIDE, INT4, BM, STAGES, SUMS, OPERAND)  # fmt: skip
        # A place for tokens holds as many outputs of them: free when the other group has multiplied the last stage.
        mbarrier.wait(empty.index((stages - 1) % STAGES), (stages - 1) // STAGES & 1)
        done = True
        if SHARED:  # noqa: SIM102 - one is known at compile time
            if late >= 0:
                total, done = _add_parts(total, partial, counters, late // parts * 2 + SIDE, late % parts, parts, BM,
                                         SUMS)  # fmt: skip
        if done:
            _finish(total, x_tiles.index(SIDE), arrived.index(SIDE), scales, bias, residual, out, first, token, outputs,
                    scale_stride, INT4, BIAS, RESIDUAL, SUMS)  # fmt: skip

    @gluon.jit(do_not_specialize=["whole", "part", "parts", "tiles", "across"])
    def _warp_specialised(
        x, weight, scales, bias, residual, out, partial, counters, outputs, columns, whole, part, parts, tiles, across,
        scale_stride,
        INT4: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, SHARED: gl.constexpr, TOGETHER: gl.constexpr,
        BM: gl.constexpr, STAGES: gl.constexpr,
    ):  # fmt: skip
        gdc_launch_dependents()
        HALVES: gl.constexpr = 2 if INT4 else 1
        # Programs from `whole` on compute parts of the columns of the last tiles.
        program, begin, stages = gl.program_id(0), 0, columns // (64 * HALVES)
        late = program - whole
        if SHARED:  # noqa: SIM102 - one is known at compile time
            if late >= 0:
                program = whole + late // parts
                begin = late % parts * part
                stages = gl.minimum(part, stages - begin)
        tile, column = tile_of(program, tiles, across, TOGETHER)
        row, token = tile * 128, column * BM
        x_tiles = gl.allocate_shared_memory(x.dtype, [STAGES * HALVES, BM, 64], x.layout)
        codes = gl.allocate_shared_memory(weight.dtype, [STAGES, 128, 64], weight.layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for place in gl.static_range(STAGES):
            mbarrier.init(ready.index(place), count=1)
            mbarrier.init(empty.index(place), count=2)
        for side in gl.static_range(2):
            mbarrier.init(arrived.index(side), count=1)
        memory = (x_tiles, codes, ready, empty)
        gl.warp_specialize(
            [
                (_multiply, (memory, arrived, scales, bias, residual, out, partial, counters, row, token, late, parts,
                             begin, stages, outputs, scale_stride, 0, INT4, BIAS, RESIDUAL, SHARED, BM, STAGES)),
                (_multiply, (memory, arrived, scales, bias, residual, out, partial, counters, row, token, late, parts,
                             begin, stages, outputs, scale_stride, 1, INT4, BIAS, RESIDUAL, SHARED, BM, STAGES)),
                (_load, (memory, x, weight, row, token, begin, stages, INT4, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


def warp_specialised(
    x: Tensor,
    weight: QuantisedWeight,
    fused: Fused = PRODUCT_ONLY,
    *,
    config: dict[str, int],
) -> Tensor:
    """Return the linear layer of [rows, columns] with an int8 or int4 weight, without a gate.

    `config` has the tokens of a program (`bm`: 128 or 256), its stages in shared memory, and how many tiles of tokens
    run `together`. Where the last tiles would leave most processors idle, programs share their columns.
    """
    _, _, bias, _, residual = fused
    data, scales, bm = weight.data, weight.scales, config["bm"]
    tiles, across, stages = -(-len(data) // _OUTPUTS), -(-len(x) // bm), data.shape[1] // _BYTES
    late = tiles * across % _hopper_processors(x.device)
    part, parts = divided(stages, x.shape[1], late, _hopper_processors(x.device))
    whole = tiles * across - late
    partial, counters = workspace(x.device, late * parts * _OUTPUTS * bm if parts > 1 else 1, 2 * late)
    out = torch.empty(len(x), len(data), dtype=x.dtype, device=x.device)
    tokens, box = fused.normalised(x), [bm, 64]
    early = starts_early(x.device)
    _warp_specialised[(whole + late * parts,)](
        _described(tokens, box), _described(data, [_OUTPUTS, _BYTES]), scales, x if bias is None else bias,
        _described(out if residual is None else residual, box), _described(out, box), partial, counters, len(data),
        x.shape[1], whole, part, parts, tiles, across, scales.stride(0),
        INT4=weight.kind == "int4", BIAS=bias is not None, RESIDUAL=residual is not None, SHARED=parts > 1,
        TOGETHER=config.get("together", 8), BM=bm, STAGES=config["stages"],
        num_warps=4, maxnreg=168, **launch_options(early),
    )  # fmt: skip
    return out


def divided(stages: int, columns: int, tiles: int, processors: int) -> tuple[int, int]:
    """Return the stages of a part, an even number unless there is one part, and how many programs share a tile.

    A part has at least `_LEAST_COLUMNS`: adding up shorter parts takes longer than a tile gains.

    >>> divided(64, 4096, 52, 132), divided(64, 4096, 112, 132), divided(32, 2048, 64, 132)
    ((32, 2), (64, 1), (32, 1))
    """
    parts = min(processors // max(tiles, 1), 4, columns // _LEAST_COLUMNS)
    if tiles == 0 or parts < 2:
        return stages, 1
    part = -(-stages // parts)
    part += part % 2
    return part, -(-stages // part)


def fits_warp_specialised(x: Tensor, weight: QuantisedWeight, residual: Tensor | None) -> bool:
    """Return whether the kernel takes these: bf16 in aligned rows, columns in pairs of 64, on Hopper."""
    if gluon is None or not _hopper_processors(x.device) or weight.shape[0] % 8 or weight.shape[1] % GROUP:
        return False
    tokens = [x] if residual is None else [x, residual]
    scaled = [weight.scales] if weight.kind == "int4" else []
    return all(one.dtype == torch.bfloat16 for one in tokens + scaled) and all(map(_is_aligned, [*tokens, weight.data]))


@functools.cache
def _hopper_processors(device: torch.device) -> int:
    """Return the number of processors of a Hopper GPU, 0 for other devices."""
    if not starts_early(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    return processor_count(device)


def _is_aligned(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def _described(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    kinds = {torch.bfloat16: gl.bfloat16, torch.int8: gl.int8, torch.uint8: gl.uint8}
    layout = gl.NVMMASharedLayout.get_default_for(box, kinds[tensor.dtype])
    return TensorDescriptor.from_tensor(tensor, box, layout)
