# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Rows of heads inside GPU kernels: rotary positions, rounding to int8."""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

    @triton.jit
    def rotate(x, other, dims, angles, ROTARY: tl.constexpr):
        """Return x rotated with its partners `other`; an explicit fused multiply-add rounds alike in every kernel."""
        half: tl.constexpr = ROTARY // 2
        angle = tl.where(dims < half, dims, dims - half)
        rotated = dims < ROTARY
        cos = tl.load(angles + angle, mask=rotated, other=1.0)
        sin = tl.load(angles + half + angle, mask=rotated, other=0.0)
        sign = tl.where(dims < half, -1.0, 1.0)
        return tl.where(rotated, tl.fma(x, cos, sign * other * sin), x)

    @triton.jit
    def round_row(x):
        """Return [rows, width] as int8, and the scale of each row; divisions round alike in every kernel."""
        largest = tl.max(tl.abs(x), axis=1)[:, None]
        scale = tl.where(largest > 0, tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)), 1.0)
        return tl.floor(tl.div_rn(x, tl.broadcast_to(scale, x.shape)) + 0.5).to(tl.int8), scale
