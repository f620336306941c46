"""Choose how many blocks to fetch ahead, by simulating the pipeline with measured times; the memory that they take."""

from __future__ import annotations

from collections.abc import Sequence

_CYCLES = 4
_ALMOST = 1.01


def cycle_seconds(fetch: Sequence[float], compute: Sequence[float], depth: int) -> float:
    """Return the steady seconds of one pass over all blocks, of which `depth` are fetched ahead.

    One link fetches blocks in order. A block's fetch waits until the block `depth` + 1 before it has computed, whose
    memory it takes. Passes follow one another, so that the first blocks are fetched during the last ones.

    >>> cycle_seconds([2.0, 2.0], [1.0, 1.0], depth=1)
    4.0
    >>> cycle_seconds([2.0, 2.0], [1.0, 1.0], depth=0)
    6.0
    """
    count = len(fetch)
    if not count:
        return 0.0
    link = now = 0.0
    computed: list[float] = []
    ends: list[float] = []
    for _ in range(_CYCLES):
        for block in range(count):
            waits_for = len(computed) - depth - 1
            if waits_for >= 0:
                link = max(link, computed[waits_for])
            link += fetch[block]
            now = max(now, link) + compute[block]
            computed.append(now)
        ends.append(now)
    return ends[-1] - ends[-2]


def choose_depth(fetch: Sequence[float], compute: Sequence[float], deepest: int) -> int:
    """Return the smallest number of blocks ahead that is as fast as `deepest`, to one percent.

    >>> choose_depth([1.0] * 4, [0.1] * 4, deepest=8)  # the link is the limit: one block ahead keeps it busy
    1
    >>> choose_depth([4.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], deepest=3)  # one large block among small ones
    3
    """
    best = cycle_seconds(fetch, compute, max(deepest, 1))
    for depth in range(1, deepest):
        if cycle_seconds(fetch, compute, depth) <= _ALMOST * best:
            return depth
    return max(deepest, 1)


def window_bytes(sizes: Sequence[int], depth: int) -> int:
    """Return the memory for a block and `depth` ones ahead, wherever in the cycle of blocks.

    >>> window_bytes([100, 100, 100], 1), window_bytes([512, 1024, 0], 1)
    (200, 2560)
    """
    count = len(sizes)
    if not count:
        return 0
    window = max(sum(sizes[(i + k) % count] for k in range(min(depth + 1, count))) for i in range(count))
    # Blocks of different sizes leave gaps where the ring starts again.
    uneven = depth and len({size for size in sizes if size}) > 1
    return window + (max(sizes) if uneven else 0)
