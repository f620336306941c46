"""The stages that take parts out of documents: which tasks there are. What they do is in passages.py
and spans.py."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import accumulate, pairwise

from piledriver.core import storage
from piledriver.core.config import to_mapping
from piledriver.corpus.dedup.contamination import DecontaminationSettings
from piledriver.corpus.dedup.near import hash_ranges
from piledriver.corpus.dedup.paragraphs import ParagraphSettings
from piledriver.corpus.dedup.substring import SubstringSettings
from piledriver.corpus.pipeline.catalogue import catalogued
from piledriver.corpus.pipeline.chunks import LEVEL, Chunk
from piledriver.corpus.pipeline.executors import Executor
from piledriver.corpus.pipeline.stages import StageOutcome, chunked
from piledriver.corpus.pipeline.tasks import Task
from piledriver.corpus.raw.streams import local_files

_PASSAGES, _SPANS = "piledriver.corpus.pipeline.passages", "piledriver.corpus.pipeline.spans"


def decontaminate(executor: Executor, chunks: list[Chunk], settings: DecontaminationSettings) -> StageOutcome:
    """Evaluation text out of the corpus."""
    files = [(path, origin) for path, origin, _ in local_files(settings.files)]
    index = Task(
        f"{_PASSAGES}:contamination_index",
        {"files": [[origin, storage.sha256(path)] for path, origin in files], "words": settings.words},
        payload=[path for path, _ in files],
    )
    (done,) = executor.map([index])
    # The index says what the files hold; where they are is no part of the outcome.
    described = to_mapping(replace(settings, files=["in the index"]))
    described.pop("files")
    tasks = (
        Task(f"{_PASSAGES}:decontaminate_chunk", {"chunk": chunk.key, "index": done.key, "settings": described})
        for chunk in chunks
    )
    return chunked("decontaminate", zip((chunk.source for chunk in chunks), executor.map(tasks), strict=True))


def paragraphs(
    executor: Executor, chunks: list[Chunk], settings: ParagraphSettings, memory_bytes: int, level: int = LEVEL
) -> StageOutcome:
    """Lines or paragraphs that occurred before out of their documents."""
    described = asdict(settings)
    hashed = list(
        executor.map(
            Task(f"{_PASSAGES}:paragraph_hashes", {"chunk": chunk.key, "settings": described}) for chunk in chunks
        )
    )
    counts = [done.result["units"] for done in hashed]
    firsts = [0, *accumulate(counts)]
    runs = catalogued(executor, zip((done.key for done in hashed), firsts, counts, strict=False))
    found = executor.map(
        Task(f"{_PASSAGES}:repeated_paragraphs", {"runs": runs, "low": low, "high": high})
        for low, high in hash_ranges(firsts[-1], memory_bytes)
    )
    ranges = catalogued(executor, ((done.key, 0, done.result["repeated"]) for done in found))
    common = {"ranges": ranges, "settings": described, "level": level}
    tasks = (
        Task(f"{_PASSAGES}:drop_paragraphs", {"chunk": chunk.key, "first": first, "count": count, **common})
        for chunk, first, count in zip(chunks, firsts, counts, strict=False)
    )
    return chunked("paragraphs", zip((chunk.source for chunk in chunks), executor.map(tasks), strict=True))


def substring(
    executor: Executor, chunks: list[Chunk], settings: SubstringSettings, memory_bytes: int, level: int = LEVEL
) -> StageOutcome:
    """Spans of bytes that occurred before out of their documents."""
    described = asdict(settings)
    printed = list(
        executor.map(
            Task(f"{_SPANS}:substring_fingerprints", {"chunk": chunk.key, "settings": described}) for chunk in chunks
        )
    )
    sizes = [done.result["bytes"] for done in printed]
    firsts = [0, *accumulate(sizes)]
    prints = [done.result["fingerprints"] for done in printed]
    runs = catalogued(executor, zip((done.key for done in printed), firsts, prints, strict=False))
    met = executor.map(
        Task(f"{_SPANS}:substring_meetings", {"runs": runs, "low": low, "high": high})
        for low, high in hash_ranges(sum(prints), memory_bytes)
    )
    meetings = catalogued(executor, ((done.key, 0, done.result["places"]) for done in met))
    places = [
        {"chunk": chunk.key, "first": first, "count": size}
        for chunk, first, size in zip(chunks, firsts, sizes, strict=False)
    ]
    hashed = list(
        executor.map(
            Task(f"{_SPANS}:substring_windows", {**place, "meetings": meetings, "settings": described})
            for place in places
        )
    )
    sorted_runs = (
        (done.key, low, high - low) for done in hashed for low, high in pairwise(done.result["ends"]) if low < high
    )
    windows = catalogued(executor, sorted_runs)
    found = executor.map(
        Task(f"{_SPANS}:substring_repeated", {"runs": windows, "low": low, "high": high, "settings": described})
        for low, high in hash_ranges(sum(done.result["windows"] for done in hashed), memory_bytes)
    )
    repeated = catalogued(executor, ((done.key, 0, done.result["places"]) for done in found))
    tasks = (
        Task(f"{_SPANS}:cut_substrings", {**place, "repeated": repeated, "settings": described, "level": level})
        for place in places
    )
    return chunked("substring", zip((chunk.source for chunk in chunks), executor.map(tasks), strict=True))
