"""Documents between stages: chunk files of some tens of MB in the order of the whole, with what their stage dropped."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import zstandard

from piledriver.corpus.assembly.tasks import Done, task_folder
from piledriver.corpus.dedup.arrays import write_arrays
from piledriver.corpus.document import Document
from piledriver.corpus.shard_reader import read_shards
from piledriver.corpus.shard_writer import ShardFileWriter

DOCUMENTS, DROPPED, IDS = "documents.jsonl.zst", "dropped.jsonl.zst", "ids"
CHUNK_BYTES = 32 << 20
# Chunks are read a few times and thrown away: speed before size.
_LEVEL = 1


class Dropped(msgspec.Struct, frozen=True, gc=False):
    """One line of the ledger: which document went, at which stage, why, and which one was kept in its place."""

    id: str
    source: str
    stage: str
    reason: str
    detail: str = ""
    kept: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Chunk:
    """A chunk file, known by the key of the task that made it. `first` is the ordinal of its first document."""

    key: str
    source: str
    documents: int
    text_bytes: int
    first: int = 0

    def path(self, work: str, name: str = DOCUMENTS) -> str:
        """Its file in the work folder."""
        return os.path.join(task_folder(work, self.key), name)

    def read(self, work: str) -> Iterator[Document]:
        """Its documents."""
        return read_shards(self.path(work))


def numbered(chunks: Iterable[Chunk]) -> list[Chunk]:
    """The chunks with the ordinals of their first documents."""
    made, first = [], 0
    for chunk in chunks:
        made.append(replace(chunk, first=first))
        first += chunk.documents
    return made


def chunk_of(done: Done, source: str) -> Chunk:
    """The chunk that a finished task made."""
    return Chunk(done.key, source, done.result["documents"], done.result["text_bytes"])


def write_chunk(folder: str, kept: Iterable[Document | Dropped]) -> dict[str, Any]:
    """Write what a stage kept and dropped; returns the counts that the manifest adds up."""
    text_bytes = 0
    ids: list[bytes] = []
    reasons: Counter[str] = Counter()
    licences: Counter[str] = Counter()
    replaced: Counter[str] = Counter()
    with (
        ShardFileWriter(os.path.join(folder, DOCUMENTS), level=_LEVEL) as shard,
        ShardFileWriter(os.path.join(folder, DROPPED), level=_LEVEL) as ledger,
    ):
        for item in kept:
            if isinstance(item, Dropped):
                reasons[f"{item.stage}: {item.reason}"] += 1
                ledger.write_line(msgspec.json.encode(item) + b"\n")
                continue
            ids.append(item.id.encode("utf-8", "replace"))
            text_bytes += len(item.text.encode("utf-8", "replace"))
            licences[str(item.meta.get("licence", "unknown"))] += 1
            # What the pii filter took out of the documents that are still here.
            if isinstance(counts := item.meta.get("replaced"), dict):
                replaced.update(counts)
            shard.write(item)
    # Of fixed width, so that a later stage can name the document it kept without reading its chunk.
    write_arrays(os.path.join(folder, IDS), ids=np.array(ids, np.bytes_))
    return {
        "documents": len(ids),
        "text_bytes": text_bytes,
        "dropped": dict(reasons),
        "licences": dict(licences),
        "replaced": dict(replaced),
    }


def read_dropped(path: str) -> Iterator[Dropped]:
    """The ledger lines of a chunk."""
    with zstandard.open(path, "rb") as file:
        yield from msgspec.json.Decoder(Dropped).decode_lines(file.read())
