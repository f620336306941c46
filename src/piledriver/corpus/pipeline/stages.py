"""The stages of a build: which tasks there are, what their outcomes say. Chunks in, chunks out, one function each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from piledriver.core.errors import PiledriverError
from piledriver.corpus.dedup.minhash import MinHashSettings
from piledriver.corpus.dedup.near import hash_ranges
from piledriver.corpus.extract import find_pieces
from piledriver.corpus.pipeline.catalogue import catalogued
from piledriver.corpus.pipeline.chunks import CHUNK_BYTES, LEVEL, Chunk, chunk_of, numbered
from piledriver.corpus.pipeline.executors import Executor
from piledriver.corpus.pipeline.recipe import Licences, SourceEntry, StageEntry
from piledriver.corpus.pipeline.stage_settings import by_content
from piledriver.corpus.pipeline.tasks import Done, Task
from piledriver.corpus.raw.streams import local_files
from piledriver.corpus.sources import resolve
from piledriver.corpus.sources.base import piece_bytes

_STEPS = "piledriver.corpus.pipeline.steps"
CHUNK_PIECES = 50_000
# What near-duplicates are sorted and compared by. Files of a few MB for each range keep the number of reads of a large
# corpus small; a group of this many signatures of 240 bytes is held in memory.
GROUP_DOCUMENTS, GROUPS_COMPARED = 1 << 18, 4
CHECKSUM_BYTES, CHECKSUM_FILES = 1 << 28, 2_000
T = TypeVar("T")


@dataclass(frozen=True)
class StageOutcome:
    """Chunks after a stage, with what each of its tasks reported: the manifest's raw material."""

    stage: str
    chunks: list[Chunk]
    reports: list[tuple[str, dict[str, Any]]]
    """(source, result) of each task that wrote a chunk."""
    keys: list[str]
    """The keys of those tasks."""


@dataclass(frozen=True)
class InputFile:
    """One raw file as it was read."""

    source: str
    origin: str
    path: str
    size: int
    modified_ns: int
    sha256: str


def checksum_inputs(executor: Executor, name: str, entry: SourceEntry) -> list[InputFile]:
    """Every raw file of a source with its checksum. Files are hashed again only where a size or time changed."""
    found: list[tuple[str, str, int, int]] = []
    for path, origin, _ in local_files(entry.paths):
        status = os.stat(path)
        found.append((path, origin, status.st_size, status.st_mtime_ns))
    groups = list(_cut(found, lambda file: file[2], CHECKSUM_BYTES, CHECKSUM_FILES))
    tasks = (
        Task(f"{_STEPS}:checksums", {"files": [file[1:] for file in group]}, payload=[file[0] for file in group])
        for group in groups
    )
    return [
        InputFile(name, origin, path, size, modified, checksum)
        for group, done in zip(groups, executor.map(tasks), strict=True)
        for (path, origin, size, modified), checksum in zip(group, done.result["sha256"], strict=True)
    ]


def extract(executor: Executor, name: str, entry: SourceEntry, inputs: Sequence[InputFile]) -> StageOutcome:
    """Raw files to chunks. After a crash the pieces are found again, which is cheap, and the missing chunks parsed."""
    source = resolve(entry.source).prepared(sum(file.size for file in inputs))
    described = {"source": source.slug, "name": name, "inputs": _inputs_key(inputs)}

    def tasks() -> Iterator[Task]:
        for number, pieces in enumerate(_cut(find_pieces(source, entry.paths), piece_bytes, CHUNK_BYTES, CHUNK_PIECES)):
            yield Task(f"{_STEPS}:extract_chunk", {**described, "number": number}, payload=pieces)

    outcome = chunked("extract", ((name, done) for done in executor.map(tasks())))
    for file in inputs:
        status = os.stat(file.path)
        if (status.st_size, status.st_mtime_ns) != (file.size, file.modified_ns):
            raise PiledriverError(f"{file.path} changed while it was read", fix="run the build again")
    if not outcome.chunks:
        raise PiledriverError(
            f"source {name!r} has no documents in {', '.join(entry.paths)}", fix=f"it reads {source.raw_format}"
        )
    return outcome


def _inputs_key(inputs: Sequence[InputFile]) -> str:
    return Task("inputs", {"files": [[file.origin, file.sha256] for file in inputs]}).key


def _cut(items: Iterable[T], size: Callable[[T], int], most_bytes: int, most_items: int) -> Iterator[list[T]]:
    """Items in groups of about so many bytes; the cuts depend on the items alone."""
    group: list[T] = []
    filled = 0
    for item in items:
        group.append(item)
        filled += size(item)
        if filled >= most_bytes or len(group) >= most_items:
            yield group
            group, filled = [], 0
    if group:
        yield group


def filters(
    executor: Executor, chunks: list[Chunk], entries: list[StageEntry], licences: Licences, seed: int
) -> StageOutcome:
    """Licences and a run of filters, in one pass over each chunk."""
    described = [(entry, *by_content(entry.use, entry.settings, seed)) for entry in entries]

    def tasks() -> Iterator[Task]:
        for chunk in chunks:
            chosen = [item for item in described if not item[0].sources or chunk.source in item[0].sources]
            uses = [{"use": entry.use, "settings": settings} for entry, settings, _ in chosen]
            places = {checksum: path for *_, found in chosen for checksum, path in found.items()}
            arguments = {"chunk": chunk.key, "filters": uses, "allow": licences.allow, "refuse": licences.refuse}
            yield Task(f"{_STEPS}:filter_chunk", arguments, payload=places or None)

    return chunked("filter", zip((chunk.source for chunk in chunks), executor.map(tasks()), strict=True))


def exact(executor: Executor, chunks: list[Chunk], memory_bytes: int, level: int = LEVEL) -> StageOutcome:
    """Whole documents that say the same: the first is kept."""
    chunks = numbered(chunks)
    labels = _labelled(executor, _exact_edges(executor, chunks, memory_bytes), _documents(chunks))
    return _without_duplicates(executor, chunks, "exact", {"labels": labels.key, "level": level})


def _exact_edges(executor: Executor, chunks: list[Chunk], memory_bytes: int) -> Iterator[Done]:
    hashed = executor.map(Task(f"{_STEPS}:exact_hashes", {"chunk": chunk.key}) for chunk in chunks)
    runs = catalogued(executor, _runs(hashed, chunks))
    return executor.map(
        Task(f"{_STEPS}:exact_edges", {"runs": runs, "low": low, "high": high})
        for low, high in hash_ranges(_documents(chunks), memory_bytes)
    )


def near(
    executor: Executor, chunks: list[Chunk], settings: MinHashSettings, memory_bytes: int, level: int = LEVEL
) -> StageOutcome:
    """Documents that say nearly the same: the first of each cluster is kept."""
    chunks = numbered(chunks)
    edges, signatures = _near_edges(executor, chunks, settings, memory_bytes)
    labels = _labelled(executor, edges, _documents(chunks))
    found = {"labels": labels.key, "signatures": signatures, "level": level}
    return _without_duplicates(executor, chunks, "near", found)


def alike(executor: Executor, chunks: list[Chunk], settings: MinHashSettings, memory_bytes: int) -> Done:
    """Clusters of what says the same or nearly the same, over chunks that have their ordinals."""
    near_edges, _ = _near_edges(executor, chunks, settings, memory_bytes)
    edges = [*_exact_edges(executor, chunks, memory_bytes), *near_edges]
    return _labelled(executor, edges, _documents(chunks))


def _near_edges(
    executor: Executor, chunks: list[Chunk], minhash: MinHashSettings, memory_bytes: int
) -> tuple[Iterator[Done], str]:
    """(edges between near-duplicates, catalogue of signatures), by the steps of near.py; chunks have their ordinals."""
    # What two thresholds have in common need not be done twice.
    described = {name: value for name, value in asdict(minhash).items() if name != "threshold"}
    signed = executor.map(
        Task(f"{_STEPS}:near_signatures", {"chunk": chunk.key, "settings": described}) for chunk in chunks
    )
    runs = catalogued(executor, _runs(signed, chunks))
    grouped = list(_groups(chunks, GROUP_DOCUMENTS))
    banded = executor.map(
        Task(f"{_STEPS}:near_bands", {"runs": runs, "low": low, "high": high, "settings": described})
        for low, high in grouped
    )
    groups = catalogued(
        executor,
        (
            (done.key, chunks[low].first, done.result["documents"])
            for done, (low, _) in zip(banded, grouped, strict=True)
        ),
    )
    total = _documents(chunks)
    met = executor.map(
        Task(f"{_STEPS}:near_pairs", {"groups": groups, "band": band, "low": low, "high": high})
        for band in range(minhash.bands)
        for low, high in hash_ranges(total, memory_bytes)
    )
    pairs = catalogued(executor, ((done.key, 0, done.result["pairs"]) for done in met))
    found = {"runs": runs, "groups": groups, "pairs": pairs, "threshold": minhash.threshold}
    compared = executor.map(
        Task(f"{_STEPS}:near_edges", {**found, "low": low, "high": min(low + GROUPS_COMPARED, len(grouped))})
        for low in range(0, len(grouped), GROUPS_COMPARED)
    )
    return compared, runs


def _groups(chunks: list[Chunk], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of chunks with about so many documents."""
    low = 0
    for number, chunk in enumerate(chunks):
        if chunk.first + chunk.documents - chunks[low].first >= most or number == len(chunks) - 1:
            yield low, number + 1
            low = number + 1


def _labelled(executor: Executor, edges: Iterable[Done], documents: int) -> Done:
    files = catalogued(executor, ((done.key, 0, done.result["edges"]) for done in edges))
    (done,) = executor.map([Task(f"{_STEPS}:label_clusters", {"edges": files, "documents": documents})])
    return done


def _without_duplicates(executor: Executor, chunks: list[Chunk], stage: str, found: dict[str, Any]) -> StageOutcome:
    known = catalogued(executor, ((chunk.key, chunk.first, chunk.documents) for chunk in chunks))
    tasks = (
        Task(
            f"{_STEPS}:drop_duplicates",
            {
                "chunk": chunk.key,
                "first": chunk.first,
                "count": chunk.documents,
                "chunks": known,
                "stage": stage,
                **found,
            },
        )
        for chunk in chunks
    )
    return chunked(stage, zip((chunk.source for chunk in chunks), executor.map(tasks), strict=True))


def _documents(chunks: list[Chunk]) -> int:
    return sum(chunk.documents for chunk in chunks)


def _runs(dones: Iterable[Done], chunks: list[Chunk]) -> Iterator[tuple[str, int, int]]:
    return ((done.key, chunk.first, chunk.documents) for done, chunk in zip(dones, chunks, strict=True))


def chunked(stage: str, outcomes: Iterable[tuple[str, Done]]) -> StageOutcome:
    """The outcome of a stage, from its sources and finished tasks."""
    chunks, reports, keys = [], [], []
    for source, done in outcomes:
        reports.append((source, done.result))
        keys.append(done.key)
        if done.result["documents"]:
            chunks.append(chunk_of(done, source))
    return StageOutcome(stage, chunks, reports, keys)
