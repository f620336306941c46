"""Runs of an external sort: array folders whose items follow each other, and ranges of hashes to merge them by.

An item (a document, a paragraph, a byte) is known by its ordinal: its position in the sequence of all chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class SortedRun:
    """One run: its array folder, the ordinal of its first item and its number of items."""

    folder: str
    first: int
    count: int


@dataclass(frozen=True)
class RunLookup:
    """All runs of a corpus: the ordinal of the first item of each, and the array folder of run i."""

    firsts: npt.NDArray[np.uint64]
    folder: Callable[[int], str]


def hash_ranges(entries: int, memory_bytes: int) -> list[tuple[int, int]]:
    """Cut the 64-bit hashes into equal ranges [low, high), each with few enough entries to be sorted in memory.

    >>> hash_ranges(100, 1 << 20)
    [(0, 18446744073709551616)]
    """
    # An entry is a hash, an ordinal, and their copies while sorting.
    count = max(1, -(-entries * 64 // memory_bytes))
    edges = [(i << 64) // count for i in range(count + 1)]
    return list(pairwise(edges))
