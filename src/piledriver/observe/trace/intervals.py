"""Sets of time as sorted, disjoint intervals: union, intersection, difference, length."""

from __future__ import annotations

from collections.abc import Iterable

Intervals = list[tuple[float, float]]


def union(found: Iterable[tuple[float, float]]) -> Intervals:
    """Return the time that any of the intervals covers.

    >>> union([(3, 4), (0, 1), (0.5, 2)])
    [(0, 2), (3, 4)]
    """
    merged: Intervals = []
    for start, end in sorted(found):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def intersect(one: Intervals, other: Intervals) -> Intervals:
    """Return the time that is in both.

    >>> intersect([(0, 2), (3, 5)], [(1, 4)])
    [(1, 2), (3, 4)]
    """
    found: Intervals = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(one: Intervals, other: Intervals) -> Intervals:
    """Return the time that is in the first and not in the second.

    >>> subtract([(0, 5)], [(1, 2), (4, 9)])
    [(0, 1), (2, 4)]
    """
    found: Intervals = []
    j = 0
    for start, end in one:
        while j < len(other) and other[j][1] <= start:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end:
            if other[k][0] > start:
                found.append((start, other[k][0]))
            start = max(start, other[k][1])
            k += 1
        if start < end:
            found.append((start, end))
    return found


def length(found: Intervals) -> float:
    """Return the total length.

    >>> length([(0, 2), (3, 4)])
    3
    """
    return sum(end - start for start, end in found)
