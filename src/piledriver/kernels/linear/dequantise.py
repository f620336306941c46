# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""int8 and int4 weights back to floats in one pass on a GPU, for products of many rows."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.quantised_weight import GROUP, QuantisedWeight

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

    @triton.jit
    def _dequantise(data, scales, out, width, scale_stride, INT4: tl.constexpr, HALF: tl.constexpr,
                    BLOCK: tl.constexpr):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = places < width
        codes = tl.load(data + row * width + places, mask=inside, other=0)
        if INT4:
            group = places // HALF
            scale = tl.load(scales + row * scale_stride + group, mask=inside, other=0.0).to(tl.float32)
            spot = out + row * width * 2 + group * 2 * HALF + places % HALF
            low, high = (codes & 15).to(tl.float32) - 8.0, (codes >> 4).to(tl.float32) - 8.0
            tl.store(spot, (low * scale).to(out.dtype.element_ty), mask=inside)
            tl.store(spot + HALF, (high * scale).to(out.dtype.element_ty), mask=inside)
        else:
            value = codes.to(tl.float32) * tl.load(scales + row).to(tl.float32)
            tl.store(out + row * width + places, value.to(out.dtype.element_ty), mask=inside)


def dequantise_integers(weight: QuantisedWeight, dtype: torch.dtype) -> Tensor:
    """Return what an int8 weight, or an int4 weight of symmetric groups of `GROUP` columns, stands for."""
    rows, width = weight.data.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.data.device)
    block = 2048
    _dequantise[(rows, triton.cdiv(width, block))](
        weight.data, weight.scales, out, width, weight.scales.stride(0), INT4=weight.kind == "int4", HALF=GROUP // 2,
        BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out
