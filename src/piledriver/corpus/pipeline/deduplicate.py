"""Deduplicate existing shards: one stage of a build, in the order of the input, without a shuffle.

Documents keep their ids, sources and meta. An interrupted run resumes as a build does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from piledriver.core import storage
from piledriver.core.batches import batches_by_size
from piledriver.core.errors import PiledriverError, UsageError
from piledriver.core.progress import progress
from piledriver.corpus.pipeline.build import CountedExecutor, account, lock_corpus, run_stage, work_in
from piledriver.corpus.pipeline.chunks import DOCUMENTS, register_shard, write_shard_part
from piledriver.corpus.pipeline.executors import Executor, open_executor
from piledriver.corpus.pipeline.ledger import write_ledger
from piledriver.corpus.pipeline.manifest import MANIFEST, Manifest, finished_manifest, load_manifest, versions
from piledriver.corpus.pipeline.recipe import StageEntry
from piledriver.corpus.pipeline.stage_registry import StageInput, StageOutcome, make_stage, stage_outcome
from piledriver.corpus.pipeline.tasks import Task
from piledriver.corpus.shards.lines import decompressed_bytes, join_shards
from piledriver.corpus.shards.reader import count_documents, shard_paths
from piledriver.corpus.shards.writer import SUFFIX

CHUNK_DOCUMENTS = 20_000
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
    chunk_documents: int = CHUNK_DOCUMENTS,
    keep_work: bool = False,
) -> Manifest:
    """Write the documents of some shards without duplicates to `out/train`, with ledger and manifest.

    `method` and `settings` are those of a stage: exact, near, paragraphs or substring. A task reads `chunk_documents`.
    """
    entry = StageEntry(use=method, settings=dict(settings))
    make_stage(method, settings)
    paths = shard_paths(*inputs)
    if any(os.path.abspath(path).startswith(os.path.abspath(out) + os.sep) for path in paths):
        raise UsageError(f"the input {out} cannot be the output too", fix="choose another folder for the output")
    if os.path.exists(os.path.join(out, MANIFEST)) and load_manifest(out).mix:
        raise UsageError(f"{out} holds a corpus that was built from a recipe", fix="choose another folder")
    with (
        lock_corpus(out) as lock,
        work_in(out, keep=keep_work) as work,
        progress(f"dedup {method}", unit="tasks") as bar,
        open_executor("local", work, workers) as opened,
    ):
        before = [_state(path) for path in paths]
        described = [{"origin": os.path.basename(path), "sha256": storage.sha256(path)} for path in paths]
        checksums = [file["sha256"] for file in described]
        arguments = {"settings": dict(settings), "inputs": checksums, "shards": shard_bytes, "versions": versions()}
        key = Task(f"dedup {method}", arguments).key
        finished = finished_manifest(out, key)
        if finished is not None:
            return finished
        executor = CountedExecutor(opened, bar)
        read = read_shards_as_chunks(executor, work, paths, checksums, chunk_documents)
        if not read.chunks:
            raise PiledriverError("the shards have no documents", fix="check the input")
        cleaned = run_stage(StageInput(executor, read.chunks, memory_bytes, _LEVEL), entry)
        for path, state in zip(paths, before, strict=True):
            if _state(path) != state:
                raise PiledriverError(f"{path} changed while it was read", fix="run the command again")
        storage.remove_file(os.path.join(out, MANIFEST))
        published = _publish_in_order(out, cleaned, shard_bytes)
        ledger = write_ledger(out, [read, cleaned])
        manifest = Manifest(
            name=os.path.basename(os.path.abspath(out)),
            versions=versions(),
            recipe={"stages": [{"use": method, "settings": dict(settings), "sources": []}]},
            inputs=described,
            stages=[account(read), account(cleaned)],
            mix={},
            outputs=[*published, ledger],
            key=key,
        )
        lock.check()
        manifest.save(out)
    return manifest


def _state(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def read_shards_as_chunks(
    executor: Executor,
    work: str,
    paths: Sequence[str],
    checksums: Sequence[str],
    chunk_documents: int = CHUNK_DOCUMENTS,
) -> StageOutcome:
    """Return the documents of some shards as chunks, which are read in place."""

    def tasks() -> Iterator[Task]:
        for path, checksum in zip(paths, checksums, strict=True):
            name = f"{checksum}-{os.path.basename(path)}"
            register_shard(work, name, path)
            for first in range(0, count_documents(path), chunk_documents):
                yield Task.call(write_shard_part, name=name, first=first, count=chunk_documents)

    return stage_outcome("read", (("shards", result) for result in executor.map(tasks())))


def _publish_in_order(out: str, outcome: StageOutcome, shard_bytes: int) -> list[dict[str, Any]]:
    """Join the frames of the chunks to shards, in their order; return the shards' lines for the manifest."""
    folder = os.path.join(out, _SPLIT)
    os.makedirs(folder, exist_ok=True)
    parts = [result.path(DOCUMENTS) for _, result in outcome.results if result.values["documents"]]
    lines = []
    for number, group in enumerate(batches_by_size(parts, decompressed_bytes, shard_bytes)):
        name = f"{number:05d}{SUFFIX}"
        lines.append({"path": f"{_SPLIT}/{name}", "split": _SPLIT, **join_shards(group, os.path.join(folder, name))})
    for name in set(os.listdir(folder)) - {os.path.basename(line["path"]) for line in lines}:
        os.unlink(os.path.join(folder, name))
    return lines
