"""How the warp-specialised kernel divides a product: into tiles, and the columns of the last tiles into shares."""

from __future__ import annotations

import functools
from typing import NamedTuple

OUTPUTS = 128
"""Outputs of a tile."""
UNROLLED = 4
"""Pairs of 64 columns after which warps wait for their matrix instructions, if all columns are a multiple."""
_TOKENS = (32, 64, 80, 96, 128, 144, 160, 192, 256, 288, 320)
"""Tokens that a tile may have: a power of two, or the sum of two."""
_MOST_SHARES, _LEAST_PAIRS = 4, 8
"""Shares of a late tile at most, and pairs of 64 columns of a share at least."""
_CONVERSION = {"int4": 104, "int8": 112}
"""Time to convert a pair of 64 columns, in tokens that are multiplied in the same time (fitted, see `_time`)."""
_LARGE, _LARGE_COST = 256, 16
"""Tiles of more tokens than this take that much longer for a pair: their sums leave few registers."""


class Division(NamedTuple):
    """The work of a product. Programs take whole tiles first, then a share each of the columns of the others."""

    tiles: int
    """Tiles of outputs."""
    across: int
    """Tiles of tokens."""
    late: int
    """Tiles whose columns are divided: too few for all processors."""
    share: int
    """Pairs of 64 columns of late tiles that a program takes, in the order of tiles and columns."""
    takers: int
    """Programs that take a share."""

    @property
    def whole(self) -> int:
        """Tiles that one program computes."""
        return self.tiles * self.across - self.late


@functools.cache
def divide(kind: str, tokens: int, outputs: int, pairs: int, bm: int, processors: int) -> Division:
    """Return the division of a product into tiles of `bm` tokens; `pairs` of 64 columns.

    >>> divide("int4", 1024, 14336, 32, 256, 132)
    Division(tiles=112, across=4, late=52, share=16, takers=104)
    >>> divide("int4", 384, 14336, 32, 192, 132)
    Division(tiles=112, across=2, late=92, share=24, takers=123)
    """
    tiles, across = -(-outputs // OUTPUTS), -(-tokens // bm)
    late = tiles * across % processors
    multiple = 1 if pairs % UNROLLED else UNROLLED
    share = max(-(-late * pairs // processors), -(-pairs // _MOST_SHARES), _LEAST_PAIRS)
    share = -(-share // multiple) * multiple
    if late == 0 or share >= pairs or _time(kind, bm, pairs, share) >= _time(kind, bm, pairs, pairs):
        return Division(tiles, across, 0, pairs, 0)
    return Division(tiles, across, late, share, -(-late * pairs // share))


def _time(kind: str, bm: int, pairs: int, share: int) -> int:
    """Return the time of a share of a tile, in units of one token times a pair of columns.

    Adding one more share to a tile costs 450 and 2 for each token. The constants make `tokens_of_tile` pick the fastest
    of the tiles measured on an H200. Shares that do not divide tiles evenly begin within them, so that a tile has one
    more.
    """
    further = pairs // share - 1 if pairs % share == 0 else pairs // share + 1
    large = _LARGE_COST if bm > _LARGE else 0
    return share * (bm + _CONVERSION[kind] + large) + further * (450 + 2 * bm)


@functools.cache
def tokens_of_tile(kind: str, tokens: int, outputs: int, pairs: int, processors: int) -> int:
    """Return how many tokens a tile has, so that all tiles take the least time.

    >>> [tokens_of_tile("int8", tokens, 8192, 16, 132) for tokens in (160, 192, 256, 320, 512, 544, 1024)]
    [160, 192, 128, 160, 256, 288, 256]
    >>> tokens_of_tile("int4", 192, 8192, 16, 132)
    96
    """

    def time(bm: int) -> tuple[int, int]:
        work = divide(kind, tokens, outputs, pairs, bm, processors)
        rounds = -(-work.whole // processors)
        return rounds * _time(kind, bm, pairs, pairs) + (_time(kind, bm, pairs, work.share) if work.late else 0), -bm

    return min(_TOKENS, key=time)
