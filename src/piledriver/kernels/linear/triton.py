# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Linear layers of few rows as one GPU kernel that streams the weight once.

The weight is the left operand of the product (out.T = weight @ x.T), so that the same matrix instruction runs for one
row and for thousands. The columns are divided into a number of parts that depends on the weight alone; their sums are
added in order, by the last program to finish if several share a tile. Rows of the result are therefore independent of
how many there are. fp8 weights are converted in registers; int8 and int4 weights have a kernel of their own
(`integers.tiles`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.integers.tiles import integer_tiles
from piledriver.kernels.linear.workspace import workspace
from piledriver.kernels.quantised_weight import QuantisedWeight
from piledriver.kernels.registry import TritonKernel

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_LONGEST_TILE = 256
"""Most columns of a tile."""

if triton is not None:
    from piledriver.kernels.linear.products import settle
    from piledriver.kernels.linear.workspace import add_parts

    @triton.jit
    def _tile(x, weight, rows, tokens, begin, end, columns, x_stride, weight_stride, row_limit, token_limit,
              BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
        """Return [BN, BM]: rows of the weight times tokens, over columns `begin` to `end`."""
        total = tl.zeros([BN, BM], tl.float32)
        live, read = (rows < row_limit)[:, None], (tokens < token_limit)[:, None]
        w_rows = weight + rows.to(tl.int64)[:, None] * weight_stride
        x_rows = x + tokens.to(tl.int64)[:, None] * x_stride
        offsets = tl.arange(0, BK)
        for k in range(begin, end, BK):
            inside = (k + offsets < columns)[None, :]
            w = tl.load(w_rows + (k + offsets)[None, :], mask=live & inside, other=0.0)
            y = tl.load(x_rows + (k + offsets)[None, :], mask=read & inside, other=0.0)
            total = tl.dot(w.to(y.dtype), tl.trans(y), total)
            if w.dtype != y.dtype:
                total = settle(total, ASM)
        return total

    # One variant for any number of tokens: a served batch has them all.
    @triton.jit(do_not_specialize=["tokens_count"])
    def _linear(
        x, weight, scales, bias, residual, out, partial, counters, outputs, tokens_count, columns, part,
        x_stride, weight_stride, out_stride, residual_stride,
        SCALED: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PARTS: tl.constexpr,
        SHARED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
    ):  # fmt: skip
        tile, column = tl.program_id(0), tl.program_id(1)
        index = tile * BN + tl.arange(0, BN)
        tokens = column * BM + tl.arange(0, BM)
        if GATE > 0:
            rows = (index // GATE) * 2 * GATE + index % GATE
            limit = 2 * outputs
        else:
            rows = index
            limit = outputs
        total = tl.zeros([BN, BM], tl.float32)
        other = tl.zeros([BN, BM], tl.float32)
        done = True
        if SHARED:
            begin = tl.program_id(2) * part
            end = tl.minimum(begin + part, columns)
            total = _tile(x, weight, rows, tokens, begin, end, columns, x_stride, weight_stride, limit,
                          tokens_count, BN, BM, BK, ASM)  # fmt: skip
            slot = tile * tl.num_programs(1) + column
            size: tl.constexpr = BN * BM * (2 if GATE > 0 else 1)
            base = partial + slot.to(tl.int64) * PARTS * size
            within = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
            mine = base + tl.program_id(2) * size
            tl.store(mine + within, total)
            if GATE > 0:
                other = _tile(x, weight, rows + GATE, tokens, begin, end, columns, x_stride, weight_stride, limit,
                          tokens_count, BN, BM, BK, ASM)  # fmt: skip
                tl.store(mine + BN * BM + within, other)
            tl.debug_barrier()
            before = tl.atomic_add(counters + slot, 1, sem="acq_rel")
            done = before == PARTS - 1
            if done:
                tl.debug_barrier()
                total = add_parts(base + within, size, PARTS)
                if GATE > 0:
                    other = add_parts(base + BN * BM + within, size, PARTS)
                tl.store(counters + slot, 0)
        else:
            for p in range(PARTS):
                begin = p * part
                end = tl.minimum(begin + part, columns)
                total += _tile(x, weight, rows, tokens, begin, end, columns, x_stride, weight_stride, limit,
                          tokens_count, BN, BM, BK, ASM)  # fmt: skip
                if GATE > 0:
                    other += _tile(x, weight, rows + GATE, tokens, begin, end, columns, x_stride, weight_stride, limit,
                                   tokens_count, BN, BM, BK, ASM)  # fmt: skip
        if done:
            live = index < outputs
            if SCALED:
                total = total * tl.load(scales + rows, mask=live, other=0.0).to(tl.float32)[:, None]
                if GATE > 0:
                    other = other * tl.load(scales + rows + GATE, mask=live, other=0.0).to(tl.float32)[:, None]
            if BIAS:
                total = total + tl.load(bias + rows, mask=live, other=0.0).to(tl.float32)[:, None]
                if GATE > 0:
                    other = other + tl.load(bias + rows + GATE, mask=live, other=0.0).to(tl.float32)[:, None]
            if GATE > 0:
                total = total / (1.0 + tl.exp(-total)) * other
            inside = live[:, None] & (tokens < tokens_count)[None, :]
            if RESIDUAL:
                place = residual + tokens.to(tl.int64)[None, :] * residual_stride + index[:, None]
                total = total + tl.load(place, mask=inside, other=0.0).to(tl.float32)
            place = out + tokens.to(tl.int64)[None, :] * out_stride + index[:, None]
            tl.store(place, total.to(out.dtype.element_ty), mask=inside)


class TritonLinear(TritonKernel):
    """One kernel; its tile follows from the number of rows, the division of the columns from the weight."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | QuantisedWeight,
        fused: Fused = PRODUCT_ONLY,
        *,
        invariant: bool = False,
        config: dict[str, int] | None = None,
    ) -> Tensor:
        if isinstance(weight, QuantisedWeight) and weight.kind != "fp8":
            return integer_tiles(x, weight, fused, invariant=invariant, config=config)
        _, _, bias, gate_block, residual = fused
        tokens, columns = x.shape
        data = weight.data if isinstance(weight, QuantisedWeight) else weight
        scales: Any = weight.scales if isinstance(weight, QuantisedWeight) else data
        outputs = data.shape[0] // 2 if gate_block else data.shape[0]
        chosen = config or tile_shape(tokens, outputs, columns, gate=bool(gate_block))
        bn, bm, bk, parts = chosen["bn"], chosen["bm"], chosen["bk"], chosen["parts"]
        rows = fused.normalised(x)
        part = part_columns(columns, parts)
        parts = triton.cdiv(columns, part)
        tiles, across = triton.cdiv(outputs, bn), triton.cdiv(tokens, bm)
        shared = parts > 1 and across <= chosen.get("share", 4)
        factor = 2 if gate_block else 1
        partial, counters = workspace(
            x.device, tiles * across * parts * bn * bm * factor if shared else 1, tiles * across
        )
        out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
        _linear[(tiles, across, parts if shared else 1)](
            rows, data, scales, data if bias is None else bias,
            x if residual is None else residual, out, partial, counters, outputs, tokens, columns, part,
            rows.stride(0), data.stride(0), out.stride(0),
            0 if residual is None else residual.stride(0),
            SCALED=isinstance(weight, QuantisedWeight), GATE=gate_block, BIAS=bias is not None,
            RESIDUAL=residual is not None, PARTS=parts, SHARED=shared, BN=bn, BM=bm, BK=bk,
            ASM=isinstance(_linear, triton.runtime.JITFunction),
            num_warps=chosen["warps"], num_stages=chosen["stages"],
        )  # fmt: skip
        return out


def part_columns(columns: int, parts: int) -> int:
    """Return the columns of a part: a multiple of those of every tile, so that the division is the same for all."""
    return int(triton.cdiv(triton.cdiv(columns, parts), _LONGEST_TILE) * _LONGEST_TILE)


def tile_shape(tokens: int, outputs: int, columns: int, *, gate: bool) -> dict[str, int]:
    """Return the tile for a number of tokens. `parts`, the division of the columns, depends on the weight alone.

    The size of a tile changes no bit: an element is summed over the columns of a part in order, 16 at a time.
    """
    bm = min(128, max(16, triton.next_power_of_2(tokens)))
    tiles = triton.cdiv(outputs, 64) * (2 if gate else 1)
    parts = max(1, min(128 // tiles, columns // 2048))
    shape = {"bn": 64, "bm": bm, "bk": 128, "parts": parts, "warps": 4, "stages": 4 if bm <= 32 else 3}
    if bm > 64:
        return {**shape, "bk": 64, "warps": 8}
    if parts == 1 and tiles < 64 and bm <= 32:
        return {**shape, "bn": 16, "bk": 256, "warps": 2}
    return shape
