"""Partition a list of costs into contiguous parts with the smallest maximum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise


def balanced(costs: Sequence[float], parts: int) -> list[range]:
    """Return the partition with the smallest maximum (exact, by dynamic programming); of those the most even.

    >>> balanced([1, 1, 1, 1, 4], 2)
    [range(0, 4), range(4, 5)]
    """
    if not 1 <= parts <= len(costs):
        raise ValueError(f"{len(costs)} units cannot be split into {parts} parts")
    before = [0.0, *accumulate(costs)]
    largest = _table(before, parts, lambda best, part: max(best, part))[-1][-1][0]
    # Tolerates rounding of the sums.
    limit = largest * (1 + 1e-9)
    table = _table(before, parts, lambda best, part: best + part * part if part <= limit else float("inf"))
    cuts = [len(costs)]
    for row in reversed(table[1:]):
        cuts.append(row[cuts[-1]][1])
    cuts.reverse()
    return [range(begin, end) for begin, end in pairwise(cuts)]


def _table(before: list[float], parts: int, add: Callable[[float, float], float]) -> list[list[tuple[float, int]]]:
    """table[k][end]: the best value of the first `end` units in k parts, and where the last part begins."""
    units = len(before) - 1
    table = [[(0.0 if end == 0 else float("inf"), 0) for end in range(units + 1)]]
    for _ in range(parts):
        last = table[-1]
        row = [(float("inf"), 0)]
        for end in range(1, units + 1):
            row.append(min((add(last[begin][0], before[end] - before[begin]), begin) for begin in range(end)))
        table.append(row)
    return table
