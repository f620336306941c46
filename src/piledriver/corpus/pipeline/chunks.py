"""Documents between stages: chunk files of some tens of MB in the order of the whole, with what their stage dropped.

A chunk is a file of its own, or a part of a shard that exists already and is read where it stands.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import msgspec
import zstandard

from piledriver.core import storage
from piledriver.core.errors import PiledriverError
from piledriver.corpus.document import Document
from piledriver.corpus.pipeline.chunk_index import ChunkIndex
from piledriver.corpus.pipeline.tasks import Done, task_folder
from piledriver.corpus.shards.lines import read_lines
from piledriver.corpus.shards.reader import read_shards
from piledriver.corpus.shards.writer import ShardFileWriter

# Not called shards: who reads all shards below a corpus must not find these.
DOCUMENTS, DROPPED, _PART, _INPUTS = "documents.zst", "dropped.zst", "part.json", "inputs"
CHUNK_BYTES = 32 << 20
# Chunks are read a few times and thrown away: speed before size.
LEVEL = 1


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
    """A chunk, known by the key of the task that made it. `first` is the ordinal of its first document."""

    key: str
    source: str
    documents: int
    text_bytes: int
    first: int = 0


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


def write_chunk(folder: str, kept: Iterable[Document | Dropped], level: int = LEVEL) -> dict[str, Any]:
    """Write what a stage kept and dropped; returns the counts that the manifest adds up."""
    index = ChunkIndex()
    reasons: Counter[str] = Counter()
    with (
        ShardFileWriter(os.path.join(folder, DOCUMENTS), level=level) as shard,
        ShardFileWriter(os.path.join(folder, DROPPED), level=LEVEL) as ledger,
    ):
        for item in kept:
            if isinstance(item, Dropped):
                reasons[f"{item.stage}: {item.reason}"] += 1
                ledger.write_line(msgspec.json.encode(item) + b"\n")
            else:
                index.add(item)
                shard.write(item)
    return {"dropped": dict(reasons), **index.write(folder)}


def write_part(folder: str, work: str, name: str, first: int, count: int) -> dict[str, Any]:
    """A chunk that is a part of a shard: nothing is copied, the documents are looked at once."""
    index = ChunkIndex()
    for document in islice(read_shards(_input(work, name), start=first), count):
        index.add(document)
    with ShardFileWriter(os.path.join(folder, DROPPED), level=LEVEL):
        pass
    storage.write_text(os.path.join(folder, _PART), json.dumps({"name": name, "first": first, "count": count}))
    return {"dropped": {}, **index.write(folder)}


def place_input(work: str, name: str, path: str) -> None:
    """Let the parts of a shard find it: its place may change between two runs, its content may not."""
    storage.write_text(_where(work, name), json.dumps({"path": os.path.abspath(path)}))


def _input(work: str, name: str) -> str:
    return str(json.loads(storage.read_text(_where(work, name)))["path"])


def _where(work: str, name: str) -> str:
    return os.path.join(work, _INPUTS, f"{name}.json")


def chunk_documents(work: str, key: str) -> Iterator[Document]:
    """The documents of a chunk."""
    path, first, count = _place(work, key)
    return islice(read_shards(path, start=first), count)


def chunk_lines(work: str, key: str) -> Iterator[bytes]:
    """The documents of a chunk as they are written, a line each."""
    return read_lines(*_place(work, key))


def _place(work: str, key: str) -> tuple[str, int, int | None]:
    folder = task_folder(work, key)
    path = os.path.join(folder, DOCUMENTS)
    if os.path.exists(path):
        return path, 0, None
    try:
        part = json.loads(storage.read_text(os.path.join(folder, _PART)))
    except PiledriverError:
        raise PiledriverError(f"{path} is missing", fix="run the build again") from None
    return _input(work, part["name"]), part["first"], part["count"]


def read_dropped(path: str) -> Iterator[Dropped]:
    """The ledger lines of a chunk."""
    with zstandard.open(path, "rb") as file:
        yield from msgspec.json.Decoder(Dropped).decode_lines(file.read())
