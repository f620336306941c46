# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Jit helpers that turn int8 and int4 codes into bf16, two at a time.

bf16 has 128 as a number whose last 7 bits count in ones, so logical instructions and one subtraction turn two codes
into numbers.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

    @triton.jit
    def from_int8(codes, like, ASM: tl.constexpr):
        """Return int8 codes as numbers of the dtype of `like`.

        In bf16: 128 + (the lower seven bits) - (128, or 256 if the sign bit is set).
        """
        if ASM:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 a, c, d;
                prmt.b32 a, $1, 0, 0x4140;
                lop3.b32 c, a, 0x007F007F, 0x43004300, 0xEA;
                lop3.b32 d, a, 0x00800080, 0x43004300, 0xEA;
                sub.rn.bf16x2 $0, c, d;
                }""",
                "=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return codes.to(like.dtype)

    @triton.jit
    def from_int4(packed, like, ASM: tl.constexpr):
        """Return the low and the high four bits of bytes, minus 8, as numbers of the dtype of `like`."""
        if ASM:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 a, b, m;
                mov.b32 m, 0x43084308;
                prmt.b32 a, $2, 0, 0x4140;
                shr.b32 b, a, 4;
                lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
                lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
                sub.rn.bf16x2 $0, a, m;
                sub.rn.bf16x2 $1, b, m;
                }""",
                "=&r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            low, high = (packed & 15).to(tl.float32) - 8.0, (packed >> 4).to(tl.float32) - 8.0
            return low.to(like.dtype), high.to(like.dtype)

    @triton.jit
    def half_of_int4(packed, HALF: tl.constexpr):
        """Return the low (`HALF` 0) or the high four bits of bytes, minus 8, in bf16."""
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, m;
            mov.b32 m, 0x43084308;
            prmt.b32 a, $1, 0, 0x4140;
            """ + ("shr.b32 a, a, 4;" if HALF else "") + """
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
            sub.rn.bf16x2 $0, a, m;
            }""",
            "=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip

    @triton.jit
    def times(number, scale, ASM: tl.constexpr):
        """Return the product of two tensors of bf16, rounded to bf16, two at a time."""
        if ASM:
            return tl.inline_asm_elementwise(
                "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [number, scale], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            return (number.to(tl.float32) * scale.to(tl.float32)).to(number.dtype)
