"""Chunks: the documents between two stages, in files of some tens of MB, with what the stage dropped.

A chunk is a file of its own, or a part of an existing shard that is read in place.
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
from piledriver.corpus.pipeline.tasks import TaskResult, sibling_folder, work_folder
from piledriver.corpus.shards.lines import read_lines
from piledriver.corpus.shards.reader import read_shards, read_texts
from piledriver.corpus.shards.writer import ShardFileWriter

# Not named like shards: a reader of all shards below a corpus must not find these.
DOCUMENTS, DROPPED, _PART, _INPUTS = "documents.zst", "dropped.zst", "part.json", "inputs"
# Chunks are read a few times and then deleted: speed matters more than size.
LEVEL = 1


class Dropped(msgspec.Struct, frozen=True, gc=False):
    """One line of the ledger: the dropped document, the stage, the reason, and the document kept in its place."""

    id: str
    source: str
    stage: str
    reason: str
    detail: str = ""
    kept: str = ""
    origin: str = ""


@dataclass(frozen=True)
class DocumentChunk:
    """A chunk, identified by the key of the task that wrote it."""

    key: str
    source: str
    documents: int
    text_bytes: int
    first: int = 0
    """The ordinal of its first document, once `number_chunks` has set it."""


def number_chunks(chunks: Iterable[DocumentChunk]) -> list[DocumentChunk]:
    """Return the chunks with the ordinals of their first documents.

    >>> [chunk.first for chunk in number_chunks([DocumentChunk("a", "S", 3, 10), DocumentChunk("b", "S", 2, 10)])]
    [0, 3]
    """
    numbered, first = [], 0
    for chunk in chunks:
        numbered.append(replace(chunk, first=first))
        first += chunk.documents
    return numbered


def chunk_of(result: TaskResult, source: str) -> DocumentChunk:
    """Return the chunk that a finished task wrote."""
    return DocumentChunk(result.key, source, result.values["documents"], result.values["text_bytes"])


def write_chunk(folder: str, items: Iterable[Document | Dropped], level: int = LEVEL) -> dict[str, Any]:
    """Write what a stage kept and dropped into the folder of a task; return the counts that the manifest adds up."""
    index = ChunkIndex()
    reasons: Counter[str] = Counter()
    with (
        ShardFileWriter(os.path.join(folder, DOCUMENTS), level=level) as shard,
        ShardFileWriter(os.path.join(folder, DROPPED), level=LEVEL) as ledger,
    ):
        for item in items:
            if isinstance(item, Dropped):
                reasons[f"{item.stage}: {item.reason}"] += 1
                ledger.write_line(msgspec.json.encode(item) + b"\n")
            else:
                index.add(item)
                shard.write(item)
    return {"dropped": dict(reasons), **index.write(folder)}


def write_shard_part(folder: str, name: str, first: int, count: int) -> dict[str, Any]:
    """Make a chunk of some documents of a registered shard without copying them; return its counts."""
    index = ChunkIndex()
    for document in islice(read_shards(_shard_path(folder, name), start=first), count):
        index.add(document)
    with ShardFileWriter(os.path.join(folder, DROPPED), level=LEVEL):
        pass
    storage.write_text(os.path.join(folder, _PART), json.dumps({"name": name, "first": first, "count": count}))
    return {"dropped": {}, **index.write(folder)}


def register_shard(work: str, name: str, path: str) -> None:
    """Record where a shard is, for the chunks that are parts of it. Its place may change between runs of a build."""
    location = os.path.join(work, _INPUTS, f"{name}.json")
    storage.write_text(location, json.dumps({"path": os.path.abspath(path)}))


def _shard_path(folder: str, name: str) -> str:
    location = os.path.join(work_folder(folder), _INPUTS, f"{name}.json")
    return str(json.loads(storage.read_text(location))["path"])


def read_chunk(folder: str, key: str) -> Iterator[Document]:
    """Yield the documents of a chunk, from inside the task that fills `folder`."""
    path, first, count = _place(folder, key)
    return islice(read_shards(path, start=first), count)


def read_chunk_lines(folder: str, key: str) -> Iterator[bytes]:
    """Yield the documents of a chunk as encoded lines, from inside the task that fills `folder`."""
    return read_lines(*_place(folder, key))


def read_chunk_texts(folder: str, key: str) -> Iterator[str]:
    """Yield the texts of a chunk, from inside the task that fills `folder`."""
    path, first, count = _place(folder, key)
    return islice(read_texts(path, start=first), count)


def _place(folder: str, key: str) -> tuple[str, int, int | None]:
    chunk = sibling_folder(folder, key)
    path = os.path.join(chunk, DOCUMENTS)
    if os.path.exists(path):
        return path, 0, None
    try:
        part = json.loads(storage.read_text(os.path.join(chunk, _PART)))
    except PiledriverError:
        raise PiledriverError(f"{path} is missing", fix="run the build again") from None
    return _shard_path(folder, part["name"]), part["first"], part["count"]


def read_dropped(folder: str) -> Iterator[Dropped]:
    """Yield the ledger lines of the chunk in a folder."""
    with zstandard.open(os.path.join(folder, DROPPED), "rb") as file:
        yield from msgspec.json.Decoder(Dropped).decode_lines(file.read())
