"""Deduplicate shards that exist already: the same stages as in a build, in the order of the input, nothing shuffled.

Documents keep their ids, sources and meta. Work goes on after an interruption as in a build.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from piledriver.core import storage
from piledriver.core.errors import PiledriverError, UsageError
from piledriver.core.progress import progress
from piledriver.corpus.pipeline.build import WORK, Counted, account, alone, over_all
from piledriver.corpus.pipeline.chunks import DOCUMENTS, Chunk, place_input, write_part
from piledriver.corpus.pipeline.executors import Executor, executor
from piledriver.corpus.pipeline.ledger import write_ledger
from piledriver.corpus.pipeline.manifest import MANIFEST, Manifest, load_manifest
from piledriver.corpus.pipeline.publish import versions
from piledriver.corpus.pipeline.recipe import StageEntry
from piledriver.corpus.pipeline.stage_settings import stage_settings
from piledriver.corpus.pipeline.stages import StageOutcome, chunked
from piledriver.corpus.pipeline.tasks import Task, remove_leftovers, task_folder, work_of
from piledriver.corpus.shards.lines import grouped, join_shards
from piledriver.corpus.shards.reader import count_documents, shard_paths
from piledriver.corpus.shards.writer import SUFFIX

_CHUNK_DOCUMENTS = 20_000
_SPLIT, _LEVEL = "train", 3


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
    if os.path.exists(os.path.join(out, MANIFEST)) and load_manifest(out).mix:
        raise UsageError(f"{out} holds a corpus that was built from a recipe", fix="choose another folder")
    storage.make_folder(out)
    work = os.path.join(os.path.abspath(out), WORK)
    entry = StageEntry(use=method, settings=dict(settings))
    with alone(out), progress(f"dedup {method}", unit="tasks") as bar, executor("local", work, workers) as opened:
        remove_leftovers(work)
        before = [_state(path) for path in paths]
        described = [{"origin": os.path.basename(path), "sha256": storage.sha256(path)} for path in paths]
        counted = Counted(opened, bar)
        read = read_chunks(counted, work, paths, [file["sha256"] for file in described])
        if not read.chunks:
            raise PiledriverError("the shards have no documents", fix="check the input")
        cleaned = over_all(counted, memory_bytes, read.chunks, entry, _LEVEL)
        for path, state in zip(paths, before, strict=True):
            if _state(path) != state:
                raise PiledriverError(f"{path} changed while it was read", fix="run the command again")
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


def _state(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def read_part(folder: str, name: str, first: int, count: int) -> dict[str, Any]:
    """Some documents of a shard as a chunk."""
    return write_part(folder, work_of(folder), name, first, count)


def read_chunks(opened: Executor, work: str, paths: Sequence[str], checksums: Sequence[str]) -> StageOutcome:
    """Shards to chunks of some documents, which are read where they stand."""

    def tasks() -> Iterator[Task]:
        for path, checksum in zip(paths, checksums, strict=True):
            name = f"{checksum}-{os.path.basename(path)}"
            place_input(work, name, path)
            for first in range(0, count_documents(path), _CHUNK_DOCUMENTS):
                yield Task(f"{__name__}:read_part", {"name": name, "first": first, "count": _CHUNK_DOCUMENTS})

    return chunked("read", (("shards", done) for done in opened.map(tasks())))


def publish_in_order(out: str, work: str, chunks: Sequence[Chunk], shard_bytes: int) -> list[dict[str, Any]]:
    """Chunks to shards, in their order, frame by frame as they are; returns the shards' lines for the manifest."""
    folder = os.path.join(out, _SPLIT)
    os.makedirs(folder, exist_ok=True)
    parts = [os.path.join(task_folder(work, chunk.key), DOCUMENTS) for chunk in chunks]
    lines = []
    for number, group in enumerate(grouped(parts, shard_bytes)):
        name = f"{number:05d}{SUFFIX}"
        lines.append({"path": f"{_SPLIT}/{name}", "split": _SPLIT, **join_shards(group, os.path.join(folder, name))})
    for name in set(os.listdir(folder)) - {os.path.basename(line["path"]) for line in lines}:
        os.unlink(os.path.join(folder, name))
    return lines
