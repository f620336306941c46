"""How the warp-specialised kernel divides a product: into tiles, and the last tiles into parts of their columns."""

from __future__ import annotations

import functools
from typing import NamedTuple

OUTPUTS = 128
"""Outputs of a tile."""
UNROLLED = 4
"""Pairs of 64 columns after which warps wait for their matrix instructions, if all columns are a multiple."""
_TOKENS = (32, 64, 80, 96, 128, 160, 192, 256)
"""Tokens that a tile may have: a power of two, or the sum of two."""
_MOST_PARTS, _LEAST_PAIRS = 4, 8
"""Parts of the columns of a tile, which are added up one after the other, and pairs of 64 columns of a part."""


class Division(NamedTuple):
    """The work of a product. Programs take whole tiles first, then parts of the others."""

    tiles: int
    """Tiles of outputs."""
    across: int
    """Tiles of tokens."""
    late: int
    """Tiles whose columns are divided."""
    part: int
    """Pairs of 64 columns of a part."""
    parts: int
    """Parts of a late tile."""

    @property
    def whole(self) -> int:
        """Tiles that one program computes."""
        return self.tiles * self.across - self.late

    @property
    def items(self) -> int:
        """Whole tiles and parts."""
        return self.whole + self.late * self.parts


@functools.cache
def divide(tokens: int, outputs: int, pairs: int, bm: int, processors: int) -> Division:
    """Return the division of a product into tiles of `bm` tokens; `pairs` of 64 columns.

    Tiles of the last round are divided if there are too few of them for the processors.

    >>> divide(1024, 14336, 32, 256, 132)
    Division(tiles=112, across=4, late=52, part=16, parts=2)
    """
    tiles, across = -(-outputs // OUTPUTS), -(-tokens // bm)
    late = tiles * across % processors
    most = min(processors // max(late, 1), _MOST_PARTS, pairs // _LEAST_PAIRS)
    if late == 0 or most < 2:
        return Division(tiles, across, 0, pairs, 1)
    multiple = 1 if pairs % UNROLLED else UNROLLED
    part = -(-pairs // (most * multiple)) * multiple
    return Division(tiles, across, late, part, -(-pairs // part))


@functools.cache
def tokens_of_tile(tokens: int, outputs: int, pairs: int, processors: int) -> int:
    """Return how many tokens a tile has, so that all tiles take the least time.

    Measured on an H200: the 128 outputs of a tile cost as much as 96 tokens, and each further part of its columns as
    much as 8 pairs of 64 columns.

    >>> [tokens_of_tile(tokens, 8192, 16, 132) for tokens in (160, 192, 256, 320, 512, 1024)]
    [80, 96, 128, 160, 256, 256]
    """

    def time(bm: int) -> tuple[int, int]:
        work = divide(tokens, outputs, pairs, bm, processors)
        rounds = -(-work.whole // processors)
        last = work.part * (bm + 96) + (work.parts - 1) * 8 * bm if work.late else 0
        return rounds * pairs * (bm + 96) + last, -bm

    return min(_TOKENS, key=time)


def pieces(bm: int) -> tuple[int, int]:
    """Return a number of tokens as a power of two and the rest."""
    first = 1 << (bm.bit_length() - 1)
    return first, bm - first
