"""What the tasks do about repeated spans of bytes. The rule and the way to find them are in dedup/substring.py.

A byte is known by its ordinal in the corpus, so what a range of hashes finds is a sorted list of numbers, and a chunk
reads its own part of each.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from piledriver.core.config import from_mapping
from piledriver.corpus.dedup import substring
from piledriver.corpus.dedup.arrays import ArrayFile, growing_array, write_arrays
from piledriver.corpus.dedup.substring import SubstringSettings
from piledriver.corpus.document import Document
from piledriver.corpus.pipeline.catalogue import ARRAYS, Catalogue
from piledriver.corpus.pipeline.chunks import LEVEL, Dropped, chunk_documents, write_chunk
from piledriver.corpus.pipeline.tasks import work_of

UInt64Array = npt.NDArray[np.uint64]
# Windows of a chunk that are sorted at a time: a run of 24 bytes each.
_WINDOWS_AT_ONCE = 1 << 21


def substring_fingerprints(folder: str, chunk: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The fingerprints of a chunk in order of their hashes, with their places in its bytes."""
    rules = _rules(settings)
    hashes, places, size = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], 0
    for document in chunk_documents(work_of(folder), chunk):
        content = substring.as_bytes(document.text)
        found, at = substring.fingerprints(content, rules.min_bytes)
        hashes.append(found)
        places.append(at.astype(np.uint64) + np.uint64(size))
        size += len(content)
    value, place = np.concatenate(hashes), np.concatenate(places)
    order = np.argsort(value, kind="stable")
    write_arrays(os.path.join(folder, ARRAYS), hashes=value[order], places=place[order])
    return {"fingerprints": len(value), "bytes": size}


def substring_meetings(folder: str, runs: str, low: int, high: int) -> dict[str, Any]:
    """The places, sorted, of the fingerprints in one range of hashes that occur more than once."""
    values, places = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for run in Catalogue(work_of(folder), runs).runs():
        file = ArrayFile(run.path)
        begin, end = file.position("hashes", low), file.position("hashes", high)
        values.append(file.rows("hashes", begin, end))
        places.append(file.rows("places", begin, end) + np.uint64(run.first))
    value, place = np.concatenate(values), np.concatenate(places)
    order = np.argsort(value, kind="stable")
    value = value[order]
    same = value[1:] == value[:-1]
    met = np.zeros(len(value), np.bool_)
    met[1:] |= same
    met[:-1] |= same
    found = np.sort(place[order[met]])
    write_arrays(os.path.join(folder, ARRAYS), places=found)
    return {"places": len(found)}


def substring_windows(
    folder: str, chunk: str, first: int, count: int, meetings: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """The windows of a chunk whose fingerprints met, in sorted runs; `first` is the ordinal of its first byte."""
    rules = _rules(settings)
    met = _part(folder, meetings, first, count)
    waiting: list[UInt64Array] = []
    held, at, ends = 0, first, [0]
    with growing_array(os.path.join(folder, ARRAYS), "rows", np.empty((0, 3), np.uint64)) as append:

        def write_run() -> None:
            rows = np.concatenate(waiting)
            append(rows[np.argsort(rows[:, 0], kind="stable")])
            ends.append(ends[-1] + len(rows))
            waiting.clear()

        for document in chunk_documents(work_of(folder), chunk):
            content = substring.as_bytes(document.text)
            low, high = np.searchsorted(met, np.array([at, at + len(content)], np.uint64)).tolist()
            rows = substring.windows(content, rules.min_bytes, (met[low:high] - np.uint64(at)).astype(np.int64))
            rows[:, 2] += np.uint64(at)
            at += len(content)
            if len(rows):
                waiting.append(rows)
                held += len(rows)
            if held >= _WINDOWS_AT_ONCE:
                write_run()
                held = 0
        if waiting:
            write_run()
    return {"windows": ends[-1], "ends": ends}


def substring_repeated(folder: str, runs: str, low: int, high: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The places, sorted, of the windows in one range of hashes that occurred before."""
    found = [np.empty((0, 3), np.uint64)]
    for run in Catalogue(work_of(folder), runs).runs():
        file = ArrayFile(run.path)
        begin, end = (file.row_position("rows", edge, run.first, run.first + run.count) for edge in (low, high))
        found.append(file.rows("rows", begin, end))
    places = substring.repeated_windows(np.concatenate(found), _rules(settings).min_bytes)
    write_arrays(os.path.join(folder, ARRAYS), places=places)
    return {"places": len(places)}


def cut_substrings(
    folder: str, chunk: str, first: int, count: int, repeated: str, settings: dict[str, Any], level: int = LEVEL
) -> dict[str, Any]:
    """One chunk without the spans that occurred before; `first` is the ordinal of its first byte."""
    rules = _rules(settings)
    places = _part(folder, repeated, first, count)
    removed: Counter[str] = Counter()

    def kept() -> Iterator[Document | Dropped]:
        at = first
        for document in chunk_documents(work_of(folder), chunk):
            size = len(document.text.encode("utf-8", "replace"))
            low, high = np.searchsorted(places, np.array([at, at + size], np.uint64)).tolist()
            spans = substring.spans_of((places[low:high] - np.uint64(at)).tolist(), rules.min_bytes)
            at += size
            text, gone = substring.cut(document.text, spans) if spans else (document.text, 0)
            if gone:
                removed["spans"] += len(spans)
                removed["bytes"] += gone
            if gone and len(text.strip()) < rules.min_characters_left:
                yield Dropped(document.id, document.source, "substring", "repeated text", f"{gone} bytes")
            else:
                yield msgspec.structs.replace(document, text=text) if gone else document

    return {**write_chunk(folder, kept(), level), "removed": dict(removed)}


def _part(folder: str, ranges: str, first: int, count: int) -> UInt64Array:
    """The places of a chunk from the sorted places of all ranges of hashes."""
    parts = [np.empty(0, np.uint64)]
    for run in Catalogue(work_of(folder), ranges).runs():
        file = ArrayFile(run.path)
        parts.append(file.rows("places", *(file.position("places", edge) for edge in (first, first + count))))
    return np.sort(np.concatenate(parts))


def _rules(settings: dict[str, Any]) -> SubstringSettings:
    return from_mapping(SubstringSettings, settings, "substring")
