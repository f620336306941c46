"""Texts that occurred before, whole documents or paragraphs: 128-bit hashes in sorted runs, compared by ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from piledriver.corpus.dedup.arrays import open_array, position, write_arrays
from piledriver.corpus.dedup.runs import SortedRun

Hash = tuple[int, int]
_ROW = np.dtype([("hash", np.uint64), ("check", np.uint64), ("item", np.uint64)])


def normalise_case_and_space(text: str) -> str:
    """Return the text as it is compared: lower case, one space between words.

    >>> normalise_case_and_space(" One\\n TWO ")
    'one two'
    """
    return " ".join(text.lower().split())


def hash_text(text: str) -> Hash:
    """Return two independent 64-bit hashes of a text."""
    value = xxhash.xxh3_128_intdigest(text.encode("utf-8", "replace"))
    return value & 0xFFFFFFFFFFFFFFFF, value >> 64


def write_hashes(hashes: Sequence[Hash], folder: str) -> int:
    """Write one run, the hashes of consecutive items, sorted by the first hash; return how many."""
    pairs = np.array(hashes, np.uint64).reshape(-1, 2)
    order = np.argsort(pairs[:, 0], kind="stable")
    rows = np.empty(len(pairs), _ROW)
    rows["hash"], rows["check"], rows["item"] = pairs[order, 0], pairs[order, 1], order
    write_arrays(folder, hashes=rows)
    return len(pairs)


def find_repeated(
    runs: Iterable[SortedRun], low: int, high: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return (ordinal of the occurrence before, ordinal) of each item that is not the first with its hashes.

    Only hashes in [low, high) are looked at.
    """
    parts = [np.empty(0, _ROW)]
    for run in runs:
        rows = open_array(run.folder, "hashes")
        part = np.array(rows[slice(*(position(rows["hash"], edge) for edge in (low, high)))])
        part["item"] += np.uint64(run.first)
        parts.append(part)
    rows = np.concatenate(parts)
    rows = rows[np.lexsort((rows["item"], rows["check"], rows["hash"]))]
    same = (rows["hash"][1:] == rows["hash"][:-1]) & (rows["check"][1:] == rows["check"][:-1])
    return rows["item"][:-1][same], rows["item"][1:][same]
