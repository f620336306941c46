"""The stages that take parts out of documents: which tasks there are. What they do is in passages.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import accumulate

from piledriver.core import storage
from piledriver.core.config import to_mapping
from piledriver.corpus.assembly.chunks import Chunk
from piledriver.corpus.assembly.executors import Executor
from piledriver.corpus.assembly.stages import StageOutcome, chunked
from piledriver.corpus.assembly.tasks import Task
from piledriver.corpus.dedup.contamination import DecontaminationSettings
from piledriver.corpus.dedup.near import hash_ranges
from piledriver.corpus.dedup.paragraphs import ParagraphSettings
from piledriver.corpus.dedup.substring import SubstringSettings
from piledriver.corpus.streams import local_files

_PASSAGES = "piledriver.corpus.assembly.passages"


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


def paragraphs(executor: Executor, chunks: list[Chunk], settings: ParagraphSettings, memory_bytes: int) -> StageOutcome:
    """Lines or paragraphs that occurred before out of their documents."""
    described = asdict(settings)
    hashed = list(
        executor.map(
            Task(f"{_PASSAGES}:paragraph_hashes", {"chunk": chunk.key, "settings": described}) for chunk in chunks
        )
    )
    counts = [done.result["units"] for done in hashed]
    firsts = [0, *accumulate(counts)]
    runs = [[done.key, first, count] for done, first, count in zip(hashed, firsts, counts, strict=False)]
    repeated = [
        done.key
        for done in executor.map(
            Task(f"{_PASSAGES}:repeated_paragraphs", {"runs": runs, "low": low, "high": high})
            for low, high in hash_ranges(firsts[-1], memory_bytes)
        )
    ]

    def tasks() -> Iterator[Task]:
        for chunk, first, count in zip(chunks, firsts, counts, strict=False):
            arguments = {"chunk": chunk.key, "first": first, "count": count, "repeated": repeated}
            yield Task(f"{_PASSAGES}:drop_paragraphs", {**arguments, "settings": described})

    return chunked("paragraphs", zip((chunk.source for chunk in chunks), executor.map(tasks()), strict=True))


def substring(executor: Executor, chunks: list[Chunk], settings: SubstringSettings, memory_bytes: int) -> StageOutcome:
    """Spans of bytes that occurred before out of their documents."""
    described = asdict(settings)
    printed = list(
        executor.map(
            Task(f"{_PASSAGES}:substring_fingerprints", {"chunk": chunk.key, "settings": described}) for chunk in chunks
        )
    )
    firsts = [0, *accumulate(done.result["bytes"] for done in printed)]
    runs = [[done.key, first, done.result["fingerprints"]] for done, first in zip(printed, firsts, strict=False)]
    meetings = [
        done.key
        for done in executor.map(
            Task(f"{_PASSAGES}:substring_meetings", {"runs": runs, "low": low, "high": high})
            for low, high in hash_ranges(sum(run[2] for run in runs), memory_bytes)
        )
    ]
    known = [[chunk.key, done.key, first] for chunk, done, first in zip(chunks, printed, firsts, strict=False)]

    def tasks() -> Iterator[Task]:
        for number, chunk in enumerate(chunks):
            arguments = {"chunk": chunk.key, "number": number, "chunks": known, "meetings": meetings}
            yield Task(f"{_PASSAGES}:cut_substrings", {**arguments, "settings": described})

    return chunked("substring", zip((chunk.source for chunk in chunks), executor.map(tasks()), strict=True))
