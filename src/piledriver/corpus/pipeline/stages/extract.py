"""Extract: raw files of one source to chunks of documents, with a checksum of every file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from piledriver.core import storage
from piledriver.core.batches import batches_by_size
from piledriver.core.errors import PiledriverError
from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.extraction import extract_piece, find_pieces
from piledriver.corpus.pipeline.chunks import Dropped, write_chunk
from piledriver.corpus.pipeline.executors import Executor
from piledriver.corpus.pipeline.recipe import SourceEntry
from piledriver.corpus.pipeline.stage_registry import StageOutcome, stage_outcome
from piledriver.corpus.pipeline.tasks import Task
from piledriver.corpus.raw.streams import local_files
from piledriver.corpus.sources import resolve
from piledriver.corpus.sources.base import Piece, piece_bytes

_CHUNK_PIECES = 50_000
_CHECKSUM_BYTES, _CHECKSUM_FILES = 1 << 28, 2_000


@dataclass(frozen=True)
class InputFile:
    """One raw file at the time it was hashed."""

    source: str
    origin: str
    path: str
    size: int
    modified_ns: int
    sha256: str


def checksum_inputs(executor: Executor, name: str, entry: SourceEntry) -> list[InputFile]:
    """Return the raw files of a source with checksums. A file is hashed again only if its size or time changed."""
    found: list[tuple[str, str, int, int]] = []
    for path, origin, _ in local_files(entry.paths):
        status = os.stat(path)
        found.append((path, origin, status.st_size, status.st_mtime_ns))
    groups = list(batches_by_size(found, lambda file: file[2], _CHECKSUM_BYTES, _CHECKSUM_FILES))
    tasks = (
        Task.call(hash_inputs, files=[file[1:] for file in group], payload=[file[0] for file in group])
        for group in groups
    )
    return [
        InputFile(name, origin, path, size, modified, checksum)
        for group, result in zip(groups, executor.map(tasks), strict=True)
        for (path, origin, size, modified), checksum in zip(group, result.values["sha256"], strict=True)
    ]


def extract_source(
    executor: Executor, name: str, entry: SourceEntry, inputs: Sequence[InputFile], chunk_bytes: int
) -> StageOutcome:
    """Extract the documents of a source, in chunks of about `chunk_bytes` of raw data.

    Finding the pieces is cheap, so a resumed build finds them again and parses only those of missing chunks.
    """
    source = resolve(entry.source).prepared(sum(file.size for file in inputs))
    hashed = Task("inputs", {"files": [[file.origin, file.sha256] for file in inputs]}).key

    def tasks() -> Iterator[Task]:
        batches = batches_by_size(find_pieces(source, entry.paths), piece_bytes, chunk_bytes, _CHUNK_PIECES)
        for number, pieces in enumerate(batches):
            yield Task.call(extract_chunk, source=source.slug, name=name, inputs=hashed, number=number, payload=pieces)

    outcome = stage_outcome("extract", ((name, result) for result in executor.map(tasks())))
    for file in inputs:
        status = os.stat(file.path)
        if (status.st_size, status.st_mtime_ns) != (file.size, file.modified_ns):
            raise PiledriverError(f"{file.path} changed while it was read", fix="run the build again")
    if not outcome.chunks:
        raise PiledriverError(
            f"source {name!r} has no documents in {', '.join(entry.paths)}", fix=f"it reads {source.raw_format}"
        )
    return outcome


def hash_inputs(folder: str, files: list[Any], payload: list[str]) -> dict[str, Any]:
    """Return the checksums of raw files (a task); `files` has their origins, sizes and times, `payload` their paths."""
    return {"sha256": [storage.sha256(path) for path in payload]}


def extract_chunk(
    folder: str, source: str, name: str, inputs: str, number: int, payload: list[Piece | Refusal]
) -> dict[str, Any]:
    """Write the documents of some pieces (a task), and what the source rejects to the ledger.

    `inputs` is a hash of all raw files of the source; with the chunk's number it determines the pieces in `payload`.
    """
    # By the size of this chunk alone, so that the task depends on no other.
    opened = resolve(source).prepared(sum(map(piece_bytes, payload)))

    def found() -> Iterator[Document | Dropped]:
        for piece in payload:
            for item in [piece] if isinstance(piece, Refusal) else extract_piece(opened, piece):
                if isinstance(item, Refusal):
                    yield Dropped("", name, "extract", item.reason, item.detail, origin=item.origin)
                else:
                    yield Document(item.text, item.id, name, item.meta)

    return write_chunk(folder, found())
