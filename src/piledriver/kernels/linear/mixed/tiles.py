# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Linear layers with int8 or int4 weights as one GPU kernel of bf16 matrix instructions.

The weight is the left operand (out.T = weight @ x.T), which Hopper's matrix instructions take from registers: bytes of
the weight are loaded, become bf16 there and are multiplied, without a second pass through shared memory. int4 codes are
multiplied by the scale of their group, or for few tokens the sums of the group are; int8 scales follow the whole sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options, starts_early
from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.workspace import workspace
from piledriver.kernels.quantised_weight import GROUP, QuantisedWeight

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    triton = None

_DEFAULT = {"bn": 128, "bm": 128, "bk": 128, "warps": 8, "stages": 3, "parts": 1}

if triton is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait
    from piledriver.kernels.linear.mixed.conversions import CODE_UNIT, SCALED_UNIT, from_int4, from_int8, int4_factors
    from piledriver.kernels.linear.products import settle, tile_of
    from piledriver.kernels.linear.workspace import add_parts

    @triton.jit
    def _sums(x, weight, scales, tile, column, rows, begin, end, scale_stride, INT4: tl.constexpr, GROUP: tl.constexpr,
              BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
        """Return [BN, BM]: rows of the weight times tokens, over columns `begin` to `end`."""
        total = tl.zeros([BN, BM], tl.float32)
        for k in range(begin, end, BK):
            if INT4:
                # A byte holds a column of the first half of a group, and one of the second.
                first = k // GROUP * GROUP + k % GROUP // 2
                packed = weight.load([tile * BN, k // 2])
                scale = tl.load(scales + rows * scale_stride + k // GROUP)
                a = x.load([column * BM, first])
                b = x.load([column * BM, first + GROUP // 2])
                if BM <= 32:
                    # Sums of a group are fewer than its weights.
                    factors = int4_factors(tl.full(scale.shape, 1.0, scale.dtype), ASM)
                    part = tl.dot(from_int4(packed, factors, a, False, ASM), a.T)
                    part = tl.dot(from_int4(packed, factors, a, True, ASM), b.T, part)
                    total += part * scale.to(tl.float32)[:, None]
                else:
                    factors = int4_factors(scale, ASM)
                    total = tl.dot(from_int4(packed, factors, a, False, ASM), a.T, total)
                    total = tl.dot(from_int4(packed, factors, a, True, ASM), b.T, total)
            else:
                codes = weight.load([tile * BN, k])
                y = x.load([column * BM, k])
                total = tl.dot(from_int8(codes, y, ASM), y.T, total)
            total = settle(total, ASM)
        return total

    @triton.jit(do_not_specialize=["tokens_count", "parts", "tiles", "across"])
    def _mixed(
        x, weight, scales, bias, residual, out, partial, counters, outputs, tokens_count, columns, part, parts,
        tiles, across, scale_stride, out_stride, residual_stride,
        INT4: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, SHARED: tl.constexpr,
        TOGETHER: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        if EARLY:
            gdc_launch_dependents()
        tile, column = tile_of(tl.program_id(0), tiles, across, TOGETHER)
        index = tile * BN + tl.arange(0, BN)
        rows = tl.minimum(index, outputs - 1)
        tokens = column * BM + tl.arange(0, BM)
        begin = tl.program_id(1) * part if SHARED else 0
        if EARLY:
            gdc_wait()
        total = _sums(x, weight, scales, tile, column, rows, begin, tl.minimum(begin + part, columns), scale_stride,
                      INT4, GROUP, BN, BM, BK, ASM)  # fmt: skip
        done = True
        if SHARED:
            slot = tile * across + column
            base = partial + slot.to(tl.int64) * parts * (BN * BM)
            within = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
            tl.store(base + tl.program_id(1) * (BN * BM) + within, total)
            tl.debug_barrier()
            done = tl.atomic_add(counters + slot, 1, sem="acq_rel") == parts - 1
            if done:
                tl.debug_barrier()
                total = add_parts(base + within, BN * BM, parts)
                tl.store(counters + slot, 0)
        if done:
            total = total * (SCALED_UNIT if INT4 else (tl.load(scales + rows).to(tl.float32) * CODE_UNIT)[:, None])
            if BIAS:
                total = total + tl.load(bias + rows).to(tl.float32)[:, None]
            inside = (index < outputs)[:, None] & (tokens < tokens_count)[None, :]
            if RESIDUAL:
                place = residual + tokens.to(tl.int64)[None, :] * residual_stride + index[:, None]
                total = total + tl.load(place, mask=inside, other=0.0).to(tl.float32)
            place = out + tokens.to(tl.int64)[None, :] * out_stride + index[:, None]
            tl.store(place, total.to(out.dtype.element_ty), mask=inside)


def mixed(
    x: Tensor,
    weight: QuantisedWeight,
    fused: Fused = PRODUCT_ONLY,
    *,
    config: dict[str, int] | None = None,
) -> Tensor:
    """Return the linear layer of [rows, columns] with an int8 or int4 weight, without a gate."""
    _, _, bias, _, residual = fused
    tokens, columns = x.shape
    data, scales, int4 = weight.data, weight.scales, weight.kind == "int4"
    outputs = data.shape[0]
    chosen = config or _DEFAULT
    bn, bm, bk = chosen["bn"], chosen["bm"], chosen["bk"]
    unit = max(GROUP, bk)
    part = triton.cdiv(triton.cdiv(columns, chosen.get("parts", 1)), unit) * unit
    parts = triton.cdiv(columns, part)
    tiles, across = triton.cdiv(outputs, bn), triton.cdiv(tokens, bm)
    rows = fused.normalised(x)
    partial, counters = workspace(x.device, tiles * across * parts * bn * bm if parts > 1 else 1, tiles * across)
    out = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    early = starts_early(x.device)
    _mixed[(tiles * across, parts)](
        TensorDescriptor.from_tensor(rows, [bm, bk // 2 if int4 else bk]),
        TensorDescriptor.from_tensor(data, [bn, bk // 2 if int4 else bk]), scales, x if bias is None else bias,
        x if residual is None else residual, out, partial, counters, outputs, tokens, columns, part, parts,
        tiles, across, scales.stride(0), out.stride(0), 0 if residual is None else residual.stride(0),
        INT4=int4, GROUP=GROUP, BIAS=bias is not None, RESIDUAL=residual is not None, SHARED=parts > 1,
        TOGETHER=chosen.get("together", 8), BN=bn, BM=bm, BK=bk,
        ASM=isinstance(_mixed, triton.runtime.JITFunction), EARLY=early,
        num_warps=chosen["warps"], num_stages=chosen["stages"], **launch_options(early),
    )  # fmt: skip
    return out


def fits_mixed(x: Tensor) -> bool:
    """Return whether the kernel takes this input: bf16, in aligned rows, on a GPU with tensor descriptors (Hopper)."""
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x.dtype == torch.bfloat16 and aligned and x.shape[1] % 16 == 0 and starts_early(x.device)
