# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Rows as 16-bit integers in two bytes each, so that products with int8 and int4 weights are sums of integers.

An element is round(x * 32512 / max|x|) = 256 * high + low, both signed bytes: 15 bits below the largest element of its
row. Integer sums are exact, so their order does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options, starts_early

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait

    MOST = tl.constexpr(32512.0)
    # Adding 1.5 * 2^23 rounds to an integer, which the low bits of the sum then hold.
    ROUND = tl.constexpr(12582912.0)
    ROUND_BITS = tl.constexpr(0x4B400000)

    @triton.jit
    def integer_scale(most):
        """Return the factor that takes values of at most `most` to integers of at most 32512."""
        return tl.where(most > 0.0, MOST / most, 0.0)

    @triton.jit
    def integer_bits(x, factor):
        """Return int32 whose low 16 bits are round(x * factor)."""
        return tl.fma(x, factor, ROUND).to(tl.int32, bitcast=True)

    @triton.jit
    def upper_nibbles(word, ASM: tl.constexpr):
        """Return 16 times the values of the upper four bits of each byte, as signed bytes: a mask and a sign bit."""
        if ASM:
            return tl.inline_asm_elementwise(
                "lop3.b32 $0, $1, 0xF0F0F0F0, 0x80808080, 0x6A;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            return (word & -252645136) ^ -2139062144

    @triton.jit
    def _split_rows(
        x, norm, out, scales, columns, stride, eps, divisor, NORM: tl.constexpr, BLOCK: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        if EARLY:
            gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)
        places = tl.arange(0, BLOCK)
        inside = places < columns
        if EARLY:
            gdc_wait()
        value = tl.load(x + row * stride + places, mask=inside, other=0.0).to(tl.float32)
        factor = 1.0
        if NORM:
            factor = tl.rsqrt(tl.sum(value * value, axis=0) / columns + eps)
            value = value * tl.load(norm + places, mask=inside, other=0.0).to(tl.float32)
        most = tl.max(tl.abs(value), axis=0)
        bits = integer_bits(value, integer_scale(most))
        tl.store(out + (2 * row + 1) * columns + places, bits.to(tl.int8), mask=inside)
        tl.store(out + 2 * row * columns + places, ((bits + 128) >> 8).to(tl.int8), mask=inside)
        tl.store(scales + row, most / MOST * factor / divisor)


def split_rows(
    x: Tensor, norm: Tensor | None = None, eps: float = 0.0, *, padded: int, divisor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return [2 * padded, columns] of bytes (high bytes of a row, then its low ones) and [padded] scales of rows.

    With `norm`, x is normalised first (RMS). Scales are divided by `divisor`. Rows beyond those of the input are not
    set.
    """
    rows, columns = x.shape
    out = torch.empty(2 * padded, columns, dtype=torch.int8, device=x.device)
    scales = torch.empty(padded, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    early = starts_early(x.device)
    _split_rows[(rows,)](
        x, x if norm is None else norm, out, scales, columns, x.stride(0), eps, divisor,
        NORM=norm is not None, BLOCK=block, EARLY=early, num_warps=4 if block <= 2048 else 8, **launch_options(early),
    )  # fmt: skip
    return out, scales
