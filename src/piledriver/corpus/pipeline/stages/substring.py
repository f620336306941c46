"""Cut byte spans that occur earlier in the corpus. The rule and the method are in `dedup/substring.py`.

A byte is known by its ordinal in the corpus. So the result of a range of hashes is a sorted array of ordinals, and a
chunk reads its own part of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import numpy as np

from piledriver.corpus.dedup import substring
from piledriver.corpus.dedup.arrays import UInt64Array, growing_array, open_array, position, write_arrays
from piledriver.corpus.dedup.runs import hash_ranges
from piledriver.corpus.document import Document
from piledriver.corpus.pipeline.catalogue import Catalogue, store_catalogue
from piledriver.corpus.pipeline.chunks import LEVEL, Dropped, read_chunk, write_chunk
from piledriver.corpus.pipeline.stage_registry import StageInput, StageOutcome
from piledriver.corpus.pipeline.tasks import Task, work_folder

# Windows that a task sorts at once: 24 bytes each.
_WINDOWS_AT_ONCE = 1 << 21


@dataclass(frozen=True, kw_only=True)
class Substring:
    """Cut every byte span of some length that occurs earlier in the corpus, between characters."""

    min_bytes: int = 200
    """The shortest span that is cut, in bytes of UTF-8."""
    min_characters_left: int = 1
    """A document that was cut is dropped if it has fewer characters left."""

    def __post_init__(self) -> None:
        if self.min_bytes < 16:
            raise ValueError(f"min_bytes is {self.min_bytes}; it must be at least 16")

    def __call__(self, corpus: StageInput) -> StageOutcome:
        """Run the stage: match fingerprints, then the windows of matching fingerprints, then cut."""
        executor, settings = corpus.executor, asdict(self)
        tasks = (Task.call(write_fingerprints, chunk=chunk.key, settings=settings) for chunk in corpus.chunks)
        printed = list(executor.map(tasks))
        sizes = [result.values["bytes"] for result in printed]
        firsts = [0, *accumulate(sizes)]
        counts = [result.values["fingerprints"] for result in printed]
        runs = store_catalogue(executor, zip((result.key for result in printed), firsts, counts, strict=False))
        found = executor.map(
            Task.call(match_fingerprints, runs=runs, low=low, high=high)
            for low, high in hash_ranges(sum(counts), corpus.memory_bytes)
        )
        matches = store_catalogue(executor, ((result.key, 0, result.values["places"]) for result in found))
        spans = [
            {"chunk": chunk.key, "first": first, "count": size, "settings": settings}
            for chunk, first, size in zip(corpus.chunks, firsts, sizes, strict=False)
        ]
        hashed = list(executor.map(Task.call(write_windows, **span, matches=matches) for span in spans))
        sorted_runs = (
            (result.key, low, high - low)
            for result in hashed
            for low, high in pairwise(result.values["ends"])
            if low < high
        )
        windows = store_catalogue(executor, sorted_runs)
        found = executor.map(
            Task.call(match_windows, runs=windows, low=low, high=high, settings=settings)
            for low, high in hash_ranges(sum(result.values["windows"] for result in hashed), corpus.memory_bytes)
        )
        repeated = store_catalogue(executor, ((result.key, 0, result.values["places"]) for result in found))
        return corpus.rewrite(
            "substring", (Task.call(cut_chunk, **span, repeated=repeated, level=corpus.level) for span in spans)
        )


def write_fingerprints(folder: str, chunk: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Write the fingerprints of a chunk, sorted by hash, with their places in its bytes (a task)."""
    rules = Substring(**settings)
    hashes, places, size = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], 0
    for document in read_chunk(folder, chunk):
        content = substring.utf8_array(document.text)
        found, at = substring.fingerprints(content, rules.min_bytes)
        hashes.append(found)
        places.append(at.astype(np.uint64) + np.uint64(size))
        size += len(content)
    value, place = np.concatenate(hashes), np.concatenate(places)
    order = np.argsort(value, kind="stable")
    write_arrays(folder, hashes=value[order], places=place[order])
    return {"fingerprints": len(value), "bytes": size}


def match_fingerprints(folder: str, runs: str, low: int, high: int) -> dict[str, Any]:
    """Write the sorted places of the fingerprints with hashes in one range that occur more than once (a task)."""
    values, places = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for run in Catalogue(work_folder(folder), runs).runs():
        hashes = open_array(run.folder, "hashes")
        part = slice(position(hashes, low), position(hashes, high))
        values.append(np.array(hashes[part]))
        places.append(open_array(run.folder, "places")[part] + np.uint64(run.first))
    value, place = np.concatenate(values), np.concatenate(places)
    order = np.argsort(value, kind="stable")
    value = value[order]
    same = value[1:] == value[:-1]
    matched = np.zeros(len(value), np.bool_)
    matched[1:] |= same
    matched[:-1] |= same
    found = np.sort(place[order[matched]])
    write_arrays(folder, places=found)
    return {"places": len(found)}


def write_windows(
    folder: str, chunk: str, first: int, count: int, matches: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """Write the windows of a chunk whose fingerprints match, in sorted runs (a task); `first` is its first byte."""
    rules = Substring(**settings)
    matched = _places(folder, matches, first, count)
    waiting: list[UInt64Array] = []
    held, at, ends = 0, first, [0]
    with growing_array(folder, "rows", np.uint64, 3) as append:

        def write_run() -> None:
            rows = np.concatenate(waiting)
            append(rows[np.argsort(rows[:, 0], kind="stable")])
            ends.append(ends[-1] + len(rows))
            waiting.clear()

        for document in read_chunk(folder, chunk):
            content = substring.utf8_array(document.text)
            low, high = np.searchsorted(matched, np.array([at, at + len(content)], np.uint64)).tolist()
            inside = (matched[low:high] - np.uint64(at)).astype(np.int64)
            rows = substring.hash_windows(content, rules.min_bytes, inside)
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


def match_windows(folder: str, runs: str, low: int, high: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Write the sorted places of the windows with hashes in one range that occur earlier (a task)."""
    found = [np.empty((0, 3), np.uint64)]
    for run in Catalogue(work_folder(folder), runs).runs():
        rows = open_array(run.folder, "rows")[run.first : run.first + run.count]
        found.append(np.array(rows[position(rows[:, 0], low) : position(rows[:, 0], high)]))
    places = substring.repeated_windows(np.concatenate(found), Substring(**settings).min_bytes)
    write_arrays(folder, places=places)
    return {"places": len(places)}


def cut_chunk(
    folder: str, chunk: str, first: int, count: int, repeated: str, settings: dict[str, Any], level: int = LEVEL
) -> dict[str, Any]:
    """Write one chunk without the spans that occur earlier (a task); `first` is the ordinal of its first byte."""
    rules = Substring(**settings)
    places = _places(folder, repeated, first, count)
    removed: Counter[str] = Counter()

    def kept() -> Iterator[Document | Dropped]:
        at = first
        for document in read_chunk(folder, chunk):
            size = len(document.text.encode("utf-8", "replace"))
            low, high = np.searchsorted(places, np.array([at, at + size], np.uint64)).tolist()
            spans = substring.covered_spans((places[low:high] - np.uint64(at)).tolist(), rules.min_bytes)
            at += size
            text, cut = substring.cut_spans(document.text, spans) if spans else (document.text, 0)
            if cut:
                removed["spans"] += len(spans)
                removed["bytes"] += cut
            if cut and len(text.strip()) < rules.min_characters_left:
                yield Dropped(document.id, document.source, "substring", "repeated text", f"{cut} bytes")
            else:
                yield msgspec.structs.replace(document, text=text) if cut else document

    return {**write_chunk(folder, kept(), level), "removed": dict(removed)}


def _places(folder: str, ranges: str, first: int, count: int) -> UInt64Array:
    """Return the sorted places inside one chunk, from the sorted places of all ranges of hashes."""
    parts = [np.empty(0, np.uint64)]
    for run in Catalogue(work_folder(folder), ranges).runs():
        places = open_array(run.folder, "places")
        parts.append(np.array(places[position(places, first) : position(places, first + count)]))
    return np.sort(np.concatenate(parts))
