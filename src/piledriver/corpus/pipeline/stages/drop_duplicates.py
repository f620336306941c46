"""Edges between duplicates to clusters, and chunks that keep only the first document of each cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from piledriver.corpus.dedup import near
from piledriver.corpus.dedup.arrays import UInt64Array
from piledriver.corpus.dedup.clusters import cluster_rows, label_components
from piledriver.corpus.pipeline.catalogue import Catalogue, store_catalogue
from piledriver.corpus.pipeline.chunk_index import document_ids, write_filtered_index
from piledriver.corpus.pipeline.chunks import DOCUMENTS, DROPPED, LEVEL, Dropped, read_chunk_lines
from piledriver.corpus.pipeline.executors import Executor
from piledriver.corpus.pipeline.stage_registry import StageInput, StageOutcome
from piledriver.corpus.pipeline.tasks import Task, TaskResult, sibling_folder, task_folder, work_folder
from piledriver.corpus.shards.writer import ShardFileWriter


def label_clusters(executor: Executor, edges: Iterable[TaskResult], documents: int) -> TaskResult:
    """Return the finished task that holds the `clusters` of a corpus, from tasks that hold `edges`."""
    listed = store_catalogue(executor, ((result.key, 0, result.values["edges"]) for result in edges))
    (result,) = executor.map([Task.call(write_clusters, edges=listed, documents=documents)])
    return result


def write_clusters(folder: str, edges: str, documents: int) -> dict[str, Any]:
    """Write the connected components of all edges (a task)."""
    folders = (run.folder for run in Catalogue(work_folder(folder), edges).runs())
    return {"members": label_components(folders, documents, folder)}


def keep_first(corpus: StageInput, stage: str, labels: TaskResult, signatures: str | None = None) -> StageOutcome:
    """Drop every document that is not the first of its cluster. The chunks are numbered.

    `signatures` is a catalogue of MinHash signatures, if the ledger should name similarities.
    """
    chunks = store_catalogue(corpus.executor, ((c.key, c.first, c.documents) for c in corpus.chunks))
    common = {"labels": labels.key, "chunks": chunks, "stage": stage, "signatures": signatures, "level": corpus.level}
    tasks = (
        Task.call(drop_duplicates, chunk=chunk.key, first=chunk.first, count=chunk.documents, **common)
        for chunk in corpus.chunks
    )
    return corpus.rewrite(stage, tasks)


class _Meta(msgspec.Struct, gc=False):
    meta: dict[str, Any]


_meta = msgspec.json.Decoder(_Meta)


def drop_duplicates(
    folder: str,
    chunk: str,
    first: int,
    count: int,
    labels: str,
    chunks: str,
    stage: str,
    signatures: str | None = None,
    level: int = LEVEL,
) -> dict[str, Any]:
    """Write one chunk without the documents that are not the first of their cluster (a task).

    Kept lines are copied; only dropped ones are parsed, for the ledger, which names the document kept in their place.
    """
    work = work_folder(folder)
    rows = cluster_rows(sibling_folder(folder, labels), first, count)
    rows = rows[rows[:, 0] != rows[:, 1]]
    dropped = np.zeros(count, np.bool_)
    dropped[(rows[:, 0] - np.uint64(first)).astype(np.int64)] = True
    kept_ids = ids_of(work, Catalogue(work, chunks), rows[:, 1])
    details = [""] * len(rows)
    if signatures is not None:
        shares = near.estimate_similarity(Catalogue(work, signatures).lookup(), rows)
        details = [f"similarity about {share:.2f}" for share in shares.tolist()]
    with (
        ShardFileWriter(os.path.join(folder, DOCUMENTS), level=level) as shard,
        ShardFileWriter(os.path.join(folder, DROPPED), level=LEVEL) as ledger,
    ):
        reasons = iter(zip(kept_ids, details, strict=True))
        for line, is_dropped in zip(read_chunk_lines(folder, chunk), dropped.tolist(), strict=True):
            if not is_dropped:
                shard.write_line(line)
                continue
            kept, detail = next(reasons)
            meta = _meta.decode(line).meta
            entry = Dropped(meta["id"], meta["pile_set_name"], stage, f"{stage} duplicate", detail, kept)
            ledger.write_line(msgspec.json.encode(entry) + b"\n")
    counts = {f"{stage}: {stage} duplicate": len(rows)} if len(rows) else {}
    return {"dropped": counts, **write_filtered_index(folder, sibling_folder(folder, chunk), dropped)}


def ids_of(work: str, chunks: Catalogue, ordinals: UInt64Array) -> list[str]:
    """Return the ids of documents by their ordinals, opening each chunk once."""
    wanted, places = np.unique(ordinals, return_inverse=True)
    owners = chunks.owners(wanted)
    found: list[str] = []
    for owner in np.unique(owners).tolist():
        inside = (wanted[owners == owner] - np.uint64(chunks.first(owner))).astype(np.int64)
        found += document_ids(task_folder(work, chunks.key(owner)), inside)
    return [found[place] for place in places.tolist()]
