# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Rotary positions inside GPU kernels."""

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
