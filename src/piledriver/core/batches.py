"""Consecutive items in batches of bounded size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def batches_by_size(
    items: Iterable[T], size: Callable[[T], int], most_size: int, most_items: int = sys.maxsize
) -> Iterator[list[T]]:
    """Yield lists of consecutive items, each closed once it reaches `most_size` or `most_items`.

    >>> list(batches_by_size(["ab", "c", "def", "g"], len, 3))
    [['ab', 'c'], ['def'], ['g']]
    """
    batch: list[T] = []
    filled = 0
    for item in items:
        batch.append(item)
        filled += size(item)
        if filled >= most_size or len(batch) >= most_items:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch
