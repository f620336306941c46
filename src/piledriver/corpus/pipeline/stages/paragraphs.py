"""Remove lines or paragraphs that occur earlier in the corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

import msgspec
import numpy as np

from piledriver.corpus.dedup.arrays import open_array, position, write_arrays
from piledriver.corpus.dedup.exact import find_repeated, remove_units, split_units, write_hashes
from piledriver.corpus.dedup.runs import hash_ranges
from piledriver.corpus.document import Document
from piledriver.corpus.pipeline.catalogue import Catalogue, store_catalogue
from piledriver.corpus.pipeline.chunks import LEVEL, Dropped, read_chunk, write_chunk
from piledriver.corpus.pipeline.stage_registry import StageInput, StageOutcome
from piledriver.corpus.pipeline.tasks import Task, work_folder


@dataclass(frozen=True, kw_only=True)
class Paragraphs:
    """Remove lines or paragraphs that occur earlier in the corpus, compared without case and white space."""

    unit: Literal["paragraph", "line"] = "paragraph"
    """What is compared: text between blank lines, or lines."""
    min_characters: int = 100
    """Shorter units (headings, closing brackets) are never removed."""
    min_kept: float = 0.0
    """A document is dropped if less than this share of its characters is left."""

    def __post_init__(self) -> None:
        if self.min_characters < 1 or not 0 <= self.min_kept <= 1:
            raise ValueError("min_characters must be at least 1 and min_kept from 0 to 1")

    def __call__(self, corpus: StageInput) -> StageOutcome:
        """Run the stage."""
        executor, settings = corpus.executor, asdict(self)
        tasks = (Task.call(hash_paragraphs, chunk=chunk.key, settings=settings) for chunk in corpus.chunks)
        hashed = list(executor.map(tasks))
        counts = [result.values["units"] for result in hashed]
        firsts = [0, *accumulate(counts)]
        runs = store_catalogue(executor, zip((result.key for result in hashed), firsts, counts, strict=False))
        found = executor.map(
            Task.call(match_paragraphs, runs=runs, low=low, high=high)
            for low, high in hash_ranges(firsts[-1], corpus.memory_bytes)
        )
        ranges = store_catalogue(executor, ((result.key, 0, result.values["repeated"]) for result in found))
        common = {"ranges": ranges, "settings": settings, "level": corpus.level}
        return corpus.rewrite(
            "paragraphs",
            (
                Task.call(remove_paragraphs, chunk=chunk.key, first=first, count=count, **common)
                for chunk, first, count in zip(corpus.chunks, firsts, counts, strict=False)
            ),
        )


def hash_paragraphs(folder: str, chunk: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Write the sorted hashes of the units of a chunk (a task)."""
    rules = Paragraphs(**settings)
    hashes = [
        hashed
        for document in read_chunk(folder, chunk)
        for *_, hashed in split_units(document.text, rules.unit, rules.min_characters)
        if hashed
    ]
    return {"units": write_hashes(hashes, folder)}


def match_paragraphs(folder: str, runs: str, low: int, high: int) -> dict[str, Any]:
    """Write the sorted ordinals of the units with hashes in one range that occur earlier (a task)."""
    _, later = find_repeated(Catalogue(work_folder(folder), runs).runs(), low, high)
    write_arrays(folder, repeated=np.sort(later))
    return {"repeated": len(later)}


def remove_paragraphs(
    folder: str, chunk: str, first: int, count: int, ranges: str, settings: dict[str, Any], level: int = LEVEL
) -> dict[str, Any]:
    """Write one chunk without its repeated units (a task); `first` is the ordinal of its first unit."""
    rules = Paragraphs(**settings)
    repeated: set[int] = set()
    for run in Catalogue(work_folder(folder), ranges).runs():
        found = open_array(run.folder, "repeated")
        repeated.update(found[position(found, first) : position(found, first + count)].tolist())
    removed: Counter[str] = Counter()

    def kept() -> Iterator[Document | Dropped]:
        at = first
        for document in read_chunk(folder, chunk):
            text, units_removed, compared = remove_units(document.text, rules.unit, rules.min_characters, at, repeated)
            at += compared
            if not units_removed:
                yield document
                continue
            removed[f"{rules.unit}s"] += units_removed
            removed["characters"] += len(document.text) - len(text)
            if not text.strip() or len(text) < rules.min_kept * len(document.text):
                detail = f"{len(text)} of {len(document.text)} characters left"
                yield Dropped(document.id, document.source, "paragraphs", f"repeated {rules.unit}s", detail)
            else:
                yield msgspec.structs.replace(document, text=text)

    return {**write_chunk(folder, kept(), level), "removed": dict(removed)}
