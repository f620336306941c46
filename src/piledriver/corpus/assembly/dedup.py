"""Deduplicate shards that exist already: the same stages as in a build, in the order of the input, nothing shuffled.

Documents keep their ids, sources and meta. Work goes on after an interruption as in a build.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from piledriver.core import storage
from piledriver.core.errors import PiledriverError, UsageError
from piledriver.core.progress import progress
from piledriver.corpus.assembly.build import WORK, Counted, account, alone, over_all
from piledriver.corpus.assembly.chunks import Chunk, write_chunk
from piledriver.corpus.assembly.executors import Executor, executor
from piledriver.corpus.assembly.ledger import write_ledger
from piledriver.corpus.assembly.publish import versions
from piledriver.corpus.assembly.stages import StageOutcome, chunked
from piledriver.corpus.assembly.tasks import Task, remove_leftovers
from piledriver.corpus.manifest import MANIFEST, Manifest
from piledriver.corpus.recipe import StageEntry
from piledriver.corpus.shard_reader import count_documents, read_shards, shard_paths
from piledriver.corpus.shard_writer import ShardWriter
from piledriver.corpus.uses import stage_settings

_CHUNK_DOCUMENTS = 20_000
_SPLIT = "train"


def deduplicate(
    inputs: Sequence[str],
    out: str,
    method: str,
    settings: Mapping[str, Any],
    *,
    memory_bytes: int = 2 << 30,
    shard_bytes: int = 1 << 30,
    workers: int = 1,
) -> Manifest:
    """Shards without their duplicates in `out/train`, with ledger and manifest."""
    stage_settings(method, settings)
    paths = shard_paths(*inputs)
    if any(os.path.abspath(path).startswith(os.path.abspath(out) + os.sep) for path in paths):
        raise UsageError(f"{out} is where the input is", fix="choose another folder for the output")
    os.makedirs(out, exist_ok=True)
    work = os.path.join(os.path.abspath(out), WORK)
    entry = StageEntry(use=method, settings=dict(settings))
    with alone(out), progress(f"dedup {method}", unit="tasks") as bar, executor("local", work, workers) as opened:
        remove_leftovers(work)
        described = [{"origin": os.path.basename(path), "sha256": storage.sha256(path)} for path in paths]
        counted = Counted(opened, bar)
        read = read_chunks(counted, paths, [file["sha256"] for file in described])
        if not read.chunks:
            raise PiledriverError("the shards have no documents", fix="check the input")
        cleaned = over_all(counted, memory_bytes, read.chunks, entry)
        if os.path.exists(os.path.join(out, MANIFEST)):
            os.unlink(os.path.join(out, MANIFEST))
        published = publish_in_order(out, work, cleaned.chunks, shard_bytes)
        ledger = write_ledger(out, work, [read, cleaned])
    manifest = Manifest(
        name=os.path.basename(os.path.abspath(out)),
        versions=versions(),
        recipe={"stages": [{"use": method, "settings": dict(settings), "sources": []}]},
        inputs=described,
        stages=[account(read), account(cleaned)],
        mix={},
        outputs=[*published, ledger],
    )
    manifest.save(out)
    return manifest


def read_part(folder: str, sha256: str, first: int, count: int, payload: str) -> dict[str, Any]:
    """Some documents of a shard as a chunk."""
    return write_chunk(folder, islice(read_shards(payload, start=first), count))


def read_chunks(opened: Executor, paths: Sequence[str], checksums: Sequence[str]) -> StageOutcome:
    """Shards to chunks of some documents."""

    def tasks() -> Iterator[Task]:
        for path, checksum in zip(paths, checksums, strict=True):
            for first in range(0, count_documents(path), _CHUNK_DOCUMENTS):
                arguments = {"sha256": checksum, "first": first, "count": _CHUNK_DOCUMENTS}
                yield Task(f"{__name__}:read_part", arguments, payload=path)

    return chunked("read", (("shards", done) for done in opened.map(tasks())))


def publish_in_order(out: str, work: str, chunks: Sequence[Chunk], shard_bytes: int) -> list[dict[str, Any]]:
    """Chunks to shards, in their order; returns the shards' lines for the manifest."""
    folder = os.path.join(out, _SPLIT)
    os.makedirs(folder, exist_ok=True)
    with ShardWriter(folder, shard_bytes=shard_bytes) as writer:
        for chunk in chunks:
            for document in chunk.read(work):
                writer.write(document)
    names = [os.path.basename(summary.path) for summary in writer.summaries]
    for name in set(os.listdir(folder)) - set(names):
        os.unlink(os.path.join(folder, name))
    return [
        {
            "path": f"{_SPLIT}/{name}",
            "split": _SPLIT,
            "documents": summary.documents,
            "bytes": summary.compressed_bytes,
            "sha256": summary.sha256,
        }
        for name, summary in zip(names, writer.summaries, strict=True)
    ]
