# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# mypy: disable-error-code="assignment"
# ruff: noqa: N803, N806, RUF005
"""Tiles of tokens in shared memory, of any multiple of eight up to 256, or 256 and a power of two.

A tile has 64 columns of bf16. Loads and tensors have powers of two. So a tile comes in several loads, and has room for
more tokens than matrix instructions take (`narrow_instructions`). Of more than 256 tokens, the most that an instruction
takes, the first 256 are one piece and the rest another.
"""

from __future__ import annotations

try:
    from triton import constexpr_function
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
except ImportError:
    gluon = None

if gluon is not None:
    from piledriver.kernels.linear.mixed.hopper import async_load

    @constexpr_function
    def pieces_of(BM):
        """Return in how many pieces a tile is."""
        return 1 if BM <= 256 else 2

    @constexpr_function
    def width_of(BM, PIECE):
        """Return the tokens of a piece."""
        return BM - 256 if PIECE else min(BM, 256)

    @constexpr_function
    def padded(tokens):
        """Return the tokens of a tensor that has room for these: a power of two."""
        return 1 << (tokens - 1).bit_length()

    @constexpr_function
    def loads_of(BM):
        """Return the tokens of the loads of a tile: powers of two, the largest first."""
        return [1 << bit for bit in reversed(range(BM.bit_length())) if BM >> bit & 1]

    @constexpr_function
    def room_of(BM):
        """Return how many bytes a tile takes."""
        return 128 * sum(padded(width_of(BM, piece)) for piece in range(pieces_of(BM)))

    @constexpr_function
    def layout_of_tokens():
        """Return the layout of a tile in shared memory: a token is a line of 128 bytes."""
        return gl.NVMMASharedLayout(128, 16, 2)

    @gluon.jit
    def _allocate(PLACES: gl.constexpr, TOKENS: gl.constexpr):
        return gl.allocate_shared_memory(gl.bfloat16, [PLACES, TOKENS, 64], layout_of_tokens())

    @gluon.jit
    def allocate_tokens(PLACES: gl.constexpr, BM: gl.constexpr):
        """Allocate shared memory for so many tiles; return the places of each piece."""
        pieces = ()
        for piece in gl.static_range(pieces_of(BM)):
            pieces = pieces + (_allocate(PLACES, padded(width_of(BM, piece))),)
        return pieces

    @gluon.jit
    def _load_part(pieces, place, described, token, column, barrier, BM: gl.constexpr, COUNT: gl.constexpr):
        """Load `COUNT` tokens of a tile, after those of all larger loads."""
        BEFORE: gl.constexpr = BM // (2 * COUNT) * (2 * COUNT)
        part = pieces[BEFORE // 256].index(place).slice(BEFORE % 256, COUNT)
        async_load(described, [token + BEFORE, column], barrier, part)

    @gluon.jit
    def load_tokens(pieces, place, inputs, token, column, barrier, BM: gl.constexpr):
        """Load the tile that begins with `token` and `column`; `inputs` describe its loads."""
        for load in gl.static_range(len(loads_of(BM))):
            _load_part(pieces, place, inputs[load], token, column, barrier, BM, loads_of(BM)[load])
