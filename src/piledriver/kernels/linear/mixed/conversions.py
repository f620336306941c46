# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Jit helpers that turn int8 and int4 codes into bf16, two at a time, with one `fma`.

The low eight bits of bf16 count in a unit of 2**-133: subnormal numbers and those of the smallest exponent share it.
So a byte between zeros is a number as it stands, and half a byte too. An `fma` multiplies it by its scale and takes off
the zero point. Factors of bf16 do not reach 2**133, so the results are too small, by a power of two. Callers multiply
the sums of their products by it (`CODE_UNIT`, `SCALED_UNIT`): the bits are those that full-size numbers would give.

A multiplication moves the second byte: logic and shifts run at half the rate, on a pipe of their own (Hopper).

Constants of PTX hold a bf16 twice, in their upper bits its sign and exponent: 0x7F007F00 is 2**127. `lop3` computes
(a ^ b) & c with 0x28, (a & b) ^ c with 0x6A.
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:
    CODE_UNIT, SCALED_UNIT = tl.constexpr(2.0**6), tl.constexpr(2.0**32)
    """By what codes are divided, and codes times scales. These scales may be from 2**-94 to 2**26."""

    @triton.jit
    def from_int8(codes, like, ASM: tl.constexpr):
        """Return int8 codes divided by `CODE_UNIT`, in the dtype of `like`.

        The sign bit is inverted: that adds 128, which `fma` subtracts.
        """
        if ASM:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 bytes, moved, unit, zero;
                mov.b32 unit, 0x7F007F00;
                mov.b32 zero, 0xC000C000;
                cvt.u32.u16 bytes, $1;
                mad.lo.u32 moved, bytes, 0x01000100, 0x00800080;
                lop3.b32 bytes, bytes, moved, 0x00FF00FF, 0x28;
                fma.rn.bf16x2 $0, bytes, unit, zero;
                }""",
                "=r,h", [codes], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            return (codes.to(tl.float32) / CODE_UNIT).to(like.dtype)

    @triton.jit
    def int4_factors(scale, ASM: tl.constexpr):
        """Return columns that `from_int4` multiplies low and high codes by, and one it adds: -8 times the scale."""
        if ASM:
            low, high, zero = tl.inline_asm_elementwise(
                """{
                .reg .b32 power;
                mov.b32 power, 0x72007200;
                mul.rn.bf16x2 $0, $3, power;
                mov.b32 power, 0x70007000;
                mul.rn.bf16x2 $1, $3, power;
                mov.b32 power, 0xB100B100;
                mul.rn.bf16x2 $2, $3, power;
                }""",
                "=&r,=&r,=r,r", [scale], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
            return tl.expand_dims(low, 1), tl.expand_dims(high, 1), tl.expand_dims(zero, 1)
        else:
            column = tl.expand_dims(scale, 1)
            return column, column, column

    @triton.jit
    def from_int4(packed, factors, like, HIGH: tl.constexpr, ASM: tl.constexpr):
        """Return the low or the high four bits of bytes, minus 8, times a scale, divided by `SCALED_UNIT`.

        `factors` are those of `int4_factors`, the dtype is that of `like`.
        """
        factor = (factors[1] if HIGH else factors[0]).broadcast_to(packed.shape)
        if ASM:
            return tl.inline_asm_elementwise(
                """{
                .reg .b32 bytes, moved;
                cvt.u32.u16 bytes, $1;
                mul.lo.u32 moved, bytes, 0x01000100;
                lop3.b32 bytes, bytes, moved, """ + ("0x00F000F0" if HIGH else "0x000F000F") + """, 0x28;
                fma.rn.bf16x2 $0, bytes, $2, $3;
                }""",
                "=r,h,r,r", [packed, factor, factors[2].broadcast_to(packed.shape)],
                dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            code = ((packed >> 4) if HIGH else (packed & 15)).to(tl.float32) - 8.0
            return (code * factor.to(tl.float32) / SCALED_UNIT).to(like.dtype)

    @triton.constexpr_function
    def conversion_constants(INT4):
        """Return PTX that `converted_word` needs once."""
        zero = "0xBE00BE00" if INT4 else "0xC000C000"
        return (
            ".reg .b32 first, second, low_unit, high_unit, zero; "
            f"mov.b32 low_unit, 0x7F007F00; mov.b32 high_unit, 0x7D007D00; mov.b32 zero, {zero};"
        )

    @triton.constexpr_function
    def converted_word(word, name, INT4, NEIGHBOURS=False):
        """Return PTX that turns an operand, a word of codes, into bf16 divided by `CODE_UNIT`, in registers `name`0 on.

        The first has bytes 0 and 2 (with `NEIGHBOURS` 0 and 1), the second has the others. Of int4 these have the low
        bits, and two more the high bits.
        """
        if NEIGHBOURS:
            lines = [f"prmt.b32 first, ${word}, 0, 0x4140;", f"prmt.b32 second, ${word}, 0, 0x4342;"]
        else:
            lines = [f"mov.b32 first, ${word};", f"shr.b32 second, ${word}, 8;"]
        for half in range(2 if INT4 else 1):
            for place, pair in enumerate(("first", "second"), 2 * half):
                if INT4:
                    lines.append(f"and.b32 {name}{place}, {pair}, {('0x000F000F', '0x00F000F0')[half]};")
                else:
                    lines.append(f"lop3.b32 {name}{place}, {pair}, 0x00FF00FF, 0x00800080, 0x6A;")
                lines.append(f"fma.rn.bf16x2 {name}{place}, {name}{place}, {('low', 'high')[half]}_unit, zero;")
        return "\n".join(lines)
