# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,assignment"
# ruff: noqa: N803
"""A linear layer of a single row in deterministic mode: the sums of the tiled kernel, launched early.

Matrix instructions add up columns in the same order for every tile shape, so that a row has the bits that the tiled
kernel (`triton.py`) gives it among others, as long as both divide the columns alike. The next kernel is signalled after
the last tile, when shared memory is about to be free; before it waits, a program prefetches its first weights into the
second-level cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options, prefetched, starts_early
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.triton import part_columns, tile_shape
from piledriver.kernels.linear.workspace import workspace

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_LINE = 64
"""Elements that one prefetch brings."""

if triton is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait, prefetch
    from piledriver.kernels.linear.workspace import add_parts

    @triton.jit
    def _linear_row(
        x, weight, bias, residual, out, partial, counters, outputs, columns, part, weight_stride,
        GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr,
        BK: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        tile, piece = tl.program_id(0), tl.program_id(1)
        index = tile * BN + tl.arange(0, BN)
        live = index < outputs
        index = tl.where(live, index, 0)
        rows = index
        if GATE > 0:
            rows = (index // GATE) * 2 * GATE + index % GATE
        begin = piece * part
        end = tl.minimum(begin + part, columns)
        w_rows = weight + rows.to(tl.int64)[:, None] * weight_stride
        # The smallest tile of a matrix instruction; its first token is the row.
        tokens = tl.arange(0, 16)
        offsets = tl.arange(0, BK)
        total = tl.zeros([BN, 16], tl.float32)
        other = tl.zeros([BN, 16], tl.float32)
        if EARLY:
            if PREFETCH > 0:
                prefetch(w_rows + begin, PREFETCH, LINE)
                if GATE > 0:
                    prefetch(w_rows + GATE * weight_stride + begin, PREFETCH, LINE)
            gdc_wait()
        first = (tokens == 0)[None, :]
        here = live[:, None] & first
        places = index[:, None] + tokens[None, :] * 0
        if RESIDUAL:  # on its way while the product is computed
            added = tl.load(residual + places, mask=here, other=0.0)
        for k in range(begin, end, BK):
            inside = (k + offsets < columns)[None, :]
            w = tl.load(w_rows + (k + offsets)[None, :], mask=inside, other=0.0)
            y = tl.load(x + tokens[:, None] * 0 + (k + offsets)[None, :], mask=inside & (tokens == 0)[:, None], other=0)
            total = tl.dot(w.to(y.dtype), tl.trans(y), total)
            if GATE > 0:
                v = tl.load(w_rows + GATE * weight_stride + (k + offsets)[None, :], mask=inside, other=0.0)
                other = tl.dot(v.to(y.dtype), tl.trans(y), other)
        if EARLY:
            gdc_launch_dependents()
        done = True
        if PARTS > 1:
            size: tl.constexpr = BN * (2 if GATE > 0 else 1)
            base = partial + tile.to(tl.int64) * PARTS * size
            within = tl.arange(0, BN)[:, None] + tokens[None, :] * 0
            tl.store(base + piece * size + within, total, mask=first)
            if GATE > 0:
                tl.store(base + piece * size + BN + within, other, mask=first)
            tl.debug_barrier()
            done = tl.atomic_add(counters + tile, 1, sem="acq_rel") == PARTS - 1
            if done:
                tl.debug_barrier()
                total = add_parts(base + within, size, PARTS)
                if GATE > 0:
                    other = add_parts(base + BN + within, size, PARTS)
                tl.store(counters + tile, 0)
        if done:
            if BIAS:
                total = total + tl.load(bias + rows).to(tl.float32)[:, None]
                if GATE > 0:
                    other = other + tl.load(bias + rows + GATE).to(tl.float32)[:, None]
            if GATE > 0:
                total = total / (1.0 + tl.exp(-total)) * other
            if RESIDUAL:
                total = total + added.to(tl.float32)
            tl.store(out + places, total.to(out.dtype.element_ty), mask=here)


def invariant_row_linear(
    x: Tensor,
    weight: Tensor,
    fused: Fused = PRODUCT_ONLY,
    *,
    config: dict[str, int] | None = None,
) -> Tensor:
    """Return the linear layer of [1, columns] with a 16-bit weight."""
    _, _, bias, gate_block, residual = fused
    columns = x.shape[1]
    outputs = weight.shape[0] // 2 if gate_block else weight.shape[0]
    tiled = tile_shape(1, outputs, columns, gate=bool(gate_block))
    part = part_columns(columns, tiled["parts"])
    parts = triton.cdiv(columns, part)
    chosen = config or row_shape(outputs, parts, gate=bool(gate_block))
    tiles = triton.cdiv(outputs, chosen["bn"])
    row = fused.normalised(x)
    partial, counters = workspace(x.device, tiles * parts * chosen["bn"] * 2 if parts > 1 else 1, tiles)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    early, soon = starts_early(x.device), prefetched(chosen["prefetch"], columns - (parts - 1) * part, _LINE)
    _linear_row[(tiles, parts)](
        row, weight, weight if bias is None else bias, x if residual is None else residual, out, partial, counters,
        outputs, columns, part, weight.stride(0),
        GATE=gate_block, BIAS=bias is not None, RESIDUAL=residual is not None, PARTS=parts, BN=chosen["bn"],
        BK=chosen["bk"], PREFETCH=soon, LINE=_LINE, EARLY=early,
        num_warps=chosen["warps"], num_stages=chosen["stages"], **launch_options(early),
    )  # fmt: skip
    return out


def fits_invariant_row(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel takes this input and weight: one row, 16 bits."""
    return len(x) == 1 and weight.dtype == x.dtype and x.dtype.itemsize == 2


def row_shape(outputs: int, parts: int, *, gate: bool) -> dict[str, int]:
    """Return outputs and columns of a tile, elements of a row to prefetch (a power of two), warps and stages."""
    if gate:
        return {"bn": 32, "bk": 128, "prefetch": 256, "warps": 4, "stages": 4}
    if parts == 1 and outputs < 4096:
        return {"bn": 16, "bk": 256, "prefetch": 1024, "warps": 2, "stages": 4}
    return {"bn": 64, "bk": 128, "prefetch": 256, "warps": 4, "stages": 4}
