# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# mypy: disable-error-code="misc,name-defined,assignment"
# ruff: noqa: N803, N806, RUF005
"""Linear layers of 2 to 16 rows with small int4 weights: codes are loaded while the kernel before computes.

Two programs fit on a processor: one of this kernel, and one of the kernel before or after. As many programs as
processors take up to four tiles of 16 outputs each (`row_products`), and their eight warps divide the columns. All
tiles of codes have room in shared memory. The first two are loaded before the input, the others after it has been asked
for. Only then may the next kernel start. Earlier, its codes delay this kernel's input; after the input has arrived was
slower too (H200).

Warps do not wait for each other until all tiles are multiplied. Then the sums of the warps, which are in shared memory,
are added up. Their order depends on the weight and on whether there are more than 8 rows.

The kernel is written in Gluon, the language below Triton, for its loads and layouts.
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
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier
except ImportError:
    gluon = None

_CHUNKS = (1, 2)
"""Chunks of an output that a warp may take: with more, two programs do not fit in a processor's registers."""
_TILES = 4
"""Tiles of a program at most: with 24 KB each, two programs fit in a processor's shared memory."""
_REGISTERS = 128
"""Registers of a thread, so that two programs of eight warps fit."""
_EARLY = 2
"""Tiles of codes that are loaded before the input; with 1, 3 or 4, the product of 16 rows took longer (H200)."""

if gluon is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.linear.mixed.hopper import async_load, reinterpret
    from piledriver.kernels.linear.mixed.row_products import code_layout, load_input, load_scales, tile_sums
    from piledriver.kernels.linear.mixed.rows import store_outputs

    @gluon.jit(do_not_specialize=["tokens"])
    def _resident_rows(
        x, weight, scales, bias, residual, out, outputs, tokens, x_stride, scale_stride, out_stride, residual_stride,
        BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ROWS: gl.constexpr, CHUNKS: gl.constexpr, TILES: gl.constexpr,
        EARLY: gl.constexpr,
    ):  # fmt: skip
        first, stride = gl.program_id(0) * 16, gl.num_programs(0) * 16
        # Memory of its own for each tile: the compiler sets a barrier between accesses to parts of one.
        codes, ready, slots = (), (), ()
        for _ in gl.static_range(TILES):
            codes = codes + (gl.allocate_shared_memory(weight.dtype, [8 * CHUNKS, 16, 64], weight.layout),)
            ready = ready + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
            slots = slots + (
                gl.allocate_shared_memory(gl.float32, [8, ROWS, 16], gl.SwizzledSharedLayout(8, 2, 2, [1, 0])),
            )
        for tile in gl.static_range(TILES):
            mbarrier.init(ready[tile], count=1)
        for tile in gl.static_range(TILES):
            mbarrier.expect(ready[tile], weight.block_type.nbytes)
        for tile in gl.static_range(EARLY):
            async_load(weight, [0, first + tile * stride, 0], ready[tile], codes[tile])
        factors = ()
        for tile in gl.static_range(TILES):
            factors = factors + (load_scales(scales, first + tile * stride, outputs, scale_stride, 0, 8, CHUNKS),)
        gdc_wait()
        pieces = load_input(x, tokens, x_stride, 0, 8, CHUNKS, ROWS)
        for tile in gl.static_range(EARLY, TILES):
            async_load(weight, [0, first + tile * stride, 0], ready[tile], codes[tile])
        gdc_launch_dependents()
        for tile in gl.static_range(TILES):
            mbarrier.wait(ready[tile], 0)
            words = reinterpret(codes[tile], gl.int32, [8, CHUNKS, 16, 16], gl.NVMMASharedLayout(64, 32, 4))
            sums = tile_sums(words.load(code_layout(8, CHUNKS)), pieces, factors[tile], 8, CHUNKS, ROWS)
            reinterpret(
                slots[tile], gl.float32, [8, ROWS, 16], gl.SwizzledSharedLayout(8, 2, 2, [2, 1, 0])
            ).store(sums)  # fmt: skip
        PLACES: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [8, 1], [1, 0])
        token = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, PLACES)), 1)
        for tile in gl.static_range(TILES):
            total = gl.zeros([ROWS, 16], gl.float32, PLACES)
            for warp in gl.static_range(8):
                total += slots[tile].index(warp).load(PLACES)
            index = gl.expand_dims(first + tile * stride + gl.arange(0, 16, gl.SliceLayout(0, PLACES)), 0)
            if BIAS:
                total = total + gl.load(bias + gl.minimum(index, outputs - 1)).to(gl.float32)
            store_outputs(total, out, residual, index, token, outputs, tokens, out_stride, residual_stride, RESIDUAL)


def resident_rows(x: Tensor, weight: QuantisedWeight, fused: Fused = PRODUCT_ONLY) -> Tensor:
    """Return the linear layer of [rows, columns] with an int4 weight, without a gate."""
    _, _, bias, _, residual = fused
    data, scales, words = weight.data, weight.scales, fused.normalised(x).view(torch.int32)
    tiles, chunks, programs = -(-len(data) // OUTPUTS), data.shape[1] // BYTES, hopper_processors(x.device)
    each = -(-tiles // programs)
    out = torch.empty(len(x), len(data), dtype=x.dtype, device=x.device)
    _resident_rows[(min(tiles, programs),)](
        words, described_blocks(data, [chunks, OUTPUTS]), scales, x if bias is None else bias,
        x if residual is None else residual, out, len(data), len(x), words.stride(0), scales.stride(0), out.stride(0),
        0 if residual is None else residual.stride(0),
        BIAS=bias is not None, RESIDUAL=residual is not None, ROWS=8 if len(x) <= 8 else MOST_ROWS,
        CHUNKS=chunks // WARPS, TILES=each, EARLY=min(each, _EARLY), num_warps=WARPS,
        maxnreg=_REGISTERS, **launch_options(True),
    )  # fmt: skip
    return out


def fits_resident_rows(x: Tensor, weight: QuantisedWeight, gate_block: int) -> bool:
    """Return whether the kernel takes these: two programs fit on a processor, each with all its tiles; no gate."""
    if gate_block or not fits_rows(x, weight):
        return False
    small = weight.shape[0] <= _TILES * OUTPUTS * hopper_processors(x.device)
    return small and weight.data.shape[1] in [chunks * WARPS * BYTES for chunks in _CHUNKS]
