"""How the warp-specialised kernel divides a product: into tiles, and the columns of the last tiles into shares."""

from __future__ import annotations

import functools
from typing import NamedTuple

OUTPUTS = 128
"""Outputs of a tile."""
UNROLLED = 4
"""Pairs of 64 columns after which warps wait for their matrix instructions, if all columns are a multiple."""
TILE_TOKENS: tuple[int, ...] = (32, 48, 64, 80, 96, 104, 112, 128, 144, *range(160, 241, 8), 256, 288, 320)
"""Tokens that a tile may have, each the sum of four powers of two at most, and a kernel to compile."""
_MOST_SHARES, _LEAST_PAIRS = 4, 8
"""Shares of a late tile at most, and pairs of 64 columns of a share at least."""
_CONVERSION = 88
"""Time to convert a pair of 64 columns, in tokens that are multiplied in the same time."""
_LARGE, _LARGE_COST = 256, 40
"""Tiles of more tokens than this take that much longer for a pair: their sums leave few registers."""
_SHARING = 200
"""Time that work on a share of a tile adds, in the unit of `_time`."""
_EXCHANGE = 200
"""Time to exchange the sums of a further share of a tile; its tokens come on top, three times."""


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
def divide(tokens: int, outputs: int, pairs: int, bm: int, processors: int) -> Division:
    """Return the division of a product into tiles of `bm` tokens; `pairs` of 64 columns.

    >>> divide(1024, 14336, 32, 256, 132)
    Division(tiles=112, across=4, late=52, share=16, takers=104)
    >>> divide(384, 14336, 32, 192, 132)
    Division(tiles=112, across=2, late=92, share=24, takers=123)
    """
    tiles, across = -(-outputs // OUTPUTS), -(-tokens // bm)
    late = tiles * across % processors
    multiple = 1 if pairs % UNROLLED else UNROLLED
    share = max(-(-late * pairs // processors), -(-pairs // _MOST_SHARES), _LEAST_PAIRS)
    share = -(-share // multiple) * multiple
    if late == 0 or share >= pairs or _time(bm, pairs, share) >= _time(bm, pairs, pairs):
        return Division(tiles, across, 0, pairs, 0)
    return Division(tiles, across, late, share, -(-late * pairs // share))


def _time(bm: int, pairs: int, share: int) -> int:
    """Return the time of a share of a tile, in units of one token times a pair of columns.

    The constants are fitted, so that `tokens_of_tile` picks one of the fastest tiles for 550 products (one H200).
    Shares that do not divide tiles evenly begin within them, so that a tile has one more.
    """
    further = pairs // share - 1 if pairs % share == 0 else pairs // share + 1
    large = _LARGE_COST if bm > _LARGE else 0
    sharing = (_SHARING if share < pairs else 0) + further * (_EXCHANGE + 3 * bm)
    return share * (bm + _CONVERSION + large) + sharing


@functools.cache
def tokens_of_tile(tokens: int, outputs: int, pairs: int, processors: int) -> int:
    """Return how many tokens a tile has, so that all tiles take the least time.

    >>> [tokens_of_tile(tokens, 8192, 16, 132) for tokens in (160, 192, 200, 232, 320, 512, 544, 1024)]
    [80, 96, 104, 128, 160, 256, 288, 256]
    """

    def time(bm: int) -> tuple[int, int]:
        work = divide(tokens, outputs, pairs, bm, processors)
        rounds = -(-work.whole // processors)
        return rounds * _time(bm, pairs, pairs) + (_time(bm, pairs, work.share) if work.late else 0), -bm

    return min(TILE_TOKENS, key=time)
