"""Exact duplicates of documents, paragraphs and lines: 128-bit hashes in sorted runs, compared by ranges of hashes."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from typing import Literal

import numpy as np
import xxhash

from piledriver.corpus.dedup.arrays import UInt64Array, open_array, position, write_arrays
from piledriver.corpus.dedup.runs import SortedRun

Unit = Literal["paragraph", "line"]
_BREAKS = {"line": re.compile(r"(\n+)"), "paragraph": re.compile(r"(\n[ \t\r]*\n\s*)")}
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


def find_repeated(runs: Iterable[SortedRun], low: int, high: int) -> tuple[UInt64Array, UInt64Array]:
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


def split_units(text: str, unit: Unit, min_characters: int) -> list[tuple[str, str, Hash | None]]:
    """Return (unit, the break after it, its hash or None if it is too short to compare); joined they are the text."""
    parts = _BREAKS[unit].split(text)
    found = []
    for at in range(0, len(parts), 2):
        normal = normalise_case_and_space(parts[at])
        hashed = hash_text(normal) if len(normal) >= min_characters else None
        found.append((parts[at], parts[at + 1] if at + 1 < len(parts) else "", hashed))
    return found


def remove_units(
    text: str, unit: Unit, min_characters: int, first: int, repeated: Container[int]
) -> tuple[str, int, int]:
    """Return (the text without repeated units, how many were removed, how many were compared).

    `first` is the ordinal of the text's first compared unit; `repeated` holds ordinals.

    >>> remove_units("one\\ntwo\\none\\nend", "line", 3, 0, {2})
    ('one\\ntwo\\nend', 1, 4)
    """
    kept, removed, compared = [], 0, 0
    for part, following, hashed in split_units(text, unit, min_characters):
        if hashed is not None:
            compared += 1
            if first + compared - 1 in repeated:
                removed += 1
                continue
        kept.append((part, following))
    if not removed:
        return text, 0, compared
    # The break after the last unit that is left stood before a removed one.
    return "".join(part + following for part, following in kept).rstrip("\n"), removed, compared
