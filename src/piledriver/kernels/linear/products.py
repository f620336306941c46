# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Jit helpers of tiled products: the order of tiles, and a wait for matrix instructions that read registers."""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

    @triton.jit
    def settle(total, ASM: tl.constexpr):
        """Return `total` after the matrix instructions that compute it.

        Hopper's matrix instructions read a left operand that was converted in registers while they run. Triton 3.6
        leaves them in flight at the end of a turn of a loop, and the next turn overwrites those registers.
        """
        if ASM:
            return tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1)
        else:
            return total

    @triton.jit
    def quotient(number, divisor):
        """Return number // divisor of numbers below 2^20, faster than in integers; at most 0 of negative numbers.

        The approximate division of floats is off by up to 2^-22 of the quotient. number + 0.5 is 0.5 or more away from
        a multiple of `divisor`: too far to be rounded across it.
        """
        return ((number + 0.5) / divisor).to(tl.int32)

    @triton.jit
    def tile_of(program, tiles, across, TOGETHER: tl.constexpr):
        """Return the tile of outputs and the tile of tokens of a program.

        Programs that run at the same time share up to `TOGETHER` tiles of tokens, so that they find weights and inputs
        in the second-level cache.
        """
        block = TOGETHER * tiles
        first = quotient(program, block) * TOGETHER
        width = tl.minimum(across - first, TOGETHER)
        inside = program - first * tiles
        row = quotient(inside, width)
        return row, first + inside - row * width
