# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Linear layers of few rows as one GPU kernel that streams the weight once.

The weight is the left operand of the product (out.T = weight @ x.T), so that the same matrix instruction runs for one
row and for thousands. The columns are divided into a number of parts that depends on the weight alone; their sums are
added in order, by the last program to finish if several share a tile. Rows of the result are therefore independent of
how many there are. int8 and int4 weights are multiplied as integers with rows in two bytes an element (`integers`);
fp8 weights are converted in registers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piledriver.kernels.decode import rms_norm
from piledriver.kernels.linear.integers import split_rows
from piledriver.kernels.linear.weights import GROUP, QuantisedWeight
from piledriver.kernels.registry import TritonKernel

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_LONGEST_TILE = 256
"""Most columns of a tile."""
_KINDS = {"plain": 0, "int8": 1, "int4": 2, "fp8": 3}

if triton is not None:

    @triton.jit
    def _nibbles(packed, ASM: tl.constexpr):
        """Return the low and the high four bits of bytes, less 8, as int8."""
        if ASM:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 t;
                and.b32 t, $2, 0x0F0F0F0F;
                or.b32 t, t, 0x80808080;
                sub.u32 t, t, 0x08080808;
                xor.b32 $0, t, 0x80808080;
                shr.u32 t, $2, 4;
                and.b32 t, t, 0x0F0F0F0F;
                or.b32 t, t, 0x80808080;
                sub.u32 t, t, 0x08080808;
                xor.b32 $1, t, 0x80808080;
                }""",
                "=r,=r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
            )  # fmt: skip
        else:
            return (packed & 15).to(tl.int8) - 8, (packed >> 4).to(tl.int8) - 8

    @triton.jit
    def _tile(x, low, weight, scales, rows, tokens, begin, end, columns, x_stride, weight_stride, scale_stride,
              row_limit, token_limit, KIND: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
              HALF: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
        """Return [BN, BM]: rows of the weight times tokens, over columns `begin` to `end`."""
        total = tl.zeros([BN, BM], tl.float32)
        live, read = (rows < row_limit)[:, None], (tokens < token_limit)[:, None]
        w_rows = weight + rows.to(tl.int64)[:, None] * weight_stride
        x_rows = x + tokens.to(tl.int64)[:, None] * x_stride
        low_rows = low + tokens.to(tl.int64)[:, None] * x_stride
        if KIND == 2:
            half = tl.arange(0, HALF)
            for k in range(begin, end, 2 * HALF):
                packed = tl.load(w_rows + (k // 2 + half)[None, :], mask=live, other=0)
                first, second = _nibbles(packed, ASM)
                a = tl.load(x_rows + (k + half)[None, :], mask=read, other=0)
                b = tl.load(x_rows + (k + HALF + half)[None, :], mask=read, other=0)
                upper = tl.dot(second, tl.trans(b), tl.dot(first, tl.trans(a), out_dtype=tl.int32), out_dtype=tl.int32)
                c = tl.load(low_rows + (k + half)[None, :], mask=read, other=0)
                d = tl.load(low_rows + (k + HALF + half)[None, :], mask=read, other=0)
                lower = tl.dot(second, tl.trans(d), tl.dot(first, tl.trans(c), out_dtype=tl.int32), out_dtype=tl.int32)
                part = (upper * 256 + lower).to(tl.float32)
                scale = tl.load(scales + rows * scale_stride + k // (2 * HALF), mask=rows < row_limit, other=0.0)
                total = tl.fma(part, tl.broadcast_to(scale.to(tl.float32)[:, None], part.shape), total)
        elif KIND == 1:
            offsets = tl.arange(0, BK)
            upper = tl.zeros([BN, BM], tl.int32)
            lower = tl.zeros([BN, BM], tl.int32)
            for k in range(begin, end, BK):
                inside = (k + offsets < columns)[None, :]
                w = tl.load(w_rows + (k + offsets)[None, :], mask=live & inside, other=0)
                y = tl.load(x_rows + (k + offsets)[None, :], mask=read & inside, other=0)
                z = tl.load(low_rows + (k + offsets)[None, :], mask=read & inside, other=0)
                upper = tl.dot(w, tl.trans(y), upper, out_dtype=tl.int32)
                lower = tl.dot(w, tl.trans(z), lower, out_dtype=tl.int32)
            total = tl.fma(upper.to(tl.float32), tl.full([BN, BM], 256.0, tl.float32), lower.to(tl.float32))
        else:
            offsets = tl.arange(0, BK)
            for k in range(begin, end, BK):
                inside = (k + offsets < columns)[None, :]
                w = tl.load(w_rows + (k + offsets)[None, :], mask=live & inside, other=0.0)
                y = tl.load(x_rows + (k + offsets)[None, :], mask=read & inside, other=0.0)
                total = tl.dot(w.to(y.dtype), tl.trans(y), total)
        return total

    @triton.jit
    def _linear(
        x, low, x_scales, weight, scales, bias, residual, out, partial, counters, outputs, tokens_count, columns, part,
        x_stride, weight_stride, scale_stride, out_stride, residual_stride,
        KIND: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PARTS: tl.constexpr,
        SHARED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr,
        ASM: tl.constexpr,
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
            total = _tile(x, low, weight, scales, rows, tokens, begin, end, columns, x_stride, weight_stride,
                          scale_stride, limit, tokens_count, KIND, BN, BM, BK, HALF, ASM)  # fmt: skip
            slot = tile * tl.num_programs(1) + column
            size: tl.constexpr = BN * BM * (2 if GATE > 0 else 1)
            base = partial + slot.to(tl.int64) * PARTS * size
            within = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
            mine = base + tl.program_id(2) * size
            tl.store(mine + within, total)
            if GATE > 0:
                other = _tile(x, low, weight, scales, rows + GATE, tokens, begin, end, columns, x_stride, weight_stride,
                              scale_stride, limit, tokens_count, KIND, BN, BM, BK, HALF, ASM)  # fmt: skip
                tl.store(mine + BN * BM + within, other)
            tl.debug_barrier()
            before = tl.atomic_add(counters + slot, 1, sem="acq_rel")
            done = before == PARTS - 1
            if done:
                tl.debug_barrier()
                total = tl.load(base + within, cache_modifier=".cg")
                for p in range(1, PARTS):
                    total += tl.load(base + p * size + within, cache_modifier=".cg")
                if GATE > 0:
                    other = tl.load(base + BN * BM + within, cache_modifier=".cg")
                    for p in range(1, PARTS):
                        other += tl.load(base + p * size + BN * BM + within, cache_modifier=".cg")
                tl.store(counters + slot, 0)
        else:
            for p in range(PARTS):
                begin = p * part
                end = tl.minimum(begin + part, columns)
                total += _tile(x, low, weight, scales, rows, tokens, begin, end, columns, x_stride, weight_stride,
                               scale_stride, limit, tokens_count, KIND, BN, BM, BK, HALF, ASM)  # fmt: skip
                if GATE > 0:
                    other += _tile(x, low, weight, scales, rows + GATE, tokens, begin, end, columns, x_stride,
                                   weight_stride, scale_stride, limit, tokens_count, KIND, BN, BM, BK, HALF,
                                   ASM)  # fmt: skip
        if done:
            live = index < outputs
            if (KIND == 1) | (KIND == 2):
                token_scale = tl.load(x_scales + tokens, mask=tokens < tokens_count, other=0.0)[None, :]
                total = total * token_scale
                other = other * token_scale
            if (KIND == 1) | (KIND == 3):
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

    def __init__(self) -> None:
        self._workspaces: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._kept: list[Tensor] = []

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | QuantisedWeight,
        *,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        gate_block: int = 0,
        norm: Tensor | None = None,
        eps: float = 0.0,
        invariant: bool = False,
        config: dict[str, int] | None = None,
    ) -> Tensor:
        tokens, columns = x.shape
        kind = weight.kind if isinstance(weight, QuantisedWeight) else "plain"
        data = weight.data if isinstance(weight, QuantisedWeight) else weight
        scales: Any = weight.scales if isinstance(weight, QuantisedWeight) else data
        outputs = data.shape[0] // 2 if gate_block else data.shape[0]
        chosen = config or tile_shape(tokens, outputs, columns, kind, gate=bool(gate_block))
        bn, bm, bk, parts = chosen["bn"], chosen["bm"], chosen["bk"], chosen["parts"]
        if kind in ("int8", "int4"):
            rows, low, x_scales = split_rows(x, norm, eps)
        else:
            rows = low = x_scales = x if norm is None else rms_norm(x, norm, eps)
        part = part_columns(columns, parts)
        parts = triton.cdiv(columns, part)
        tiles, across = triton.cdiv(outputs, bn), triton.cdiv(tokens, bm)
        shared = parts > 1 and across <= chosen.get("share", 4)
        factor = 2 if gate_block else 1
        partial, counters = self._workspace(
            x.device, tiles * across * parts * bn * bm * factor if shared else 1, tiles * across
        )
        out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
        _linear[(tiles, across, parts if shared else 1)](
            rows, low, x_scales, data, scales, data if bias is None else bias,
            x if residual is None else residual, out, partial, counters, outputs, tokens, columns, part,
            rows.stride(0), data.stride(0), scales.stride(0), out.stride(0),
            0 if residual is None else residual.stride(0),
            KIND=_KINDS[kind], GATE=gate_block, BIAS=bias is not None, RESIDUAL=residual is not None, PARTS=parts,
            SHARED=shared, BN=bn, BM=bm, BK=bk, HALF=GROUP // 2,
            ASM=isinstance(_linear, triton.runtime.JITFunction),
            num_warps=chosen["warps"], num_stages=chosen["stages"],
        )  # fmt: skip
        return out

    def _workspace(self, device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
        """Return partial sums and counters, kept between calls: captured graphs hold their addresses."""
        partial, counts = self._workspaces.get(device, (torch.empty(0), torch.empty(0)))
        if partial.numel() < floats or counts.numel() < counters:
            partial = torch.empty(max(floats, 1 << 20, partial.numel()), dtype=torch.float32, device=device)
            counts = torch.zeros(max(counters, 1 << 14, counts.numel()), dtype=torch.int32, device=device)
            self._kept += [partial, counts]
            self._workspaces[device] = partial, counts
        return partial, counts


def part_columns(columns: int, parts: int) -> int:
    """Return the columns of a part: a multiple of those of every tile, so that the division is the same for all."""
    return int(triton.cdiv(triton.cdiv(columns, parts), _LONGEST_TILE) * _LONGEST_TILE)


def tile_shape(tokens: int, outputs: int, columns: int, kind: str, *, gate: bool) -> dict[str, int]:
    """Return the tile for a number of tokens. `parts`, the division of the columns, depends on the weight alone.

    The size of a tile changes no bit: an element is summed over the columns of a part in order, 16 at a time.
    """
    bm = min(128, max(16, triton.next_power_of_2(tokens)))
    integers = kind in ("int8", "int4")
    tiles = triton.cdiv(outputs, 64) * (2 if gate else 1)
    most = {"int4": 8, "int8": 4}.get(kind, columns // 2048)
    parts = max(1, min((256 if kind == "int4" else 128) // tiles, most, columns // 512))
    shape = {"bn": 64, "bm": bm, "bk": 128, "parts": parts, "warps": 4, "stages": 4 if bm <= 32 else 3}
    if bm > 64:
        return {**shape, "bk": 64, "warps": 8}
    if integers:
        long = bm > 16 and tiles > 1024
        return {**shape, "bn": 128} if long else {**shape, "bk": 256 if kind == "int8" else 128}
    if parts == 1 and tiles < 64 and bm <= 32:
        return {**shape, "bn": 16, "bk": 256, "warps": 2}
    return shape
