"""Mix: epochs, splits and the global shuffle, exact and in bounded memory.

Each document has random keys, pure functions of the seed and of its id or cluster: one selects its split, one whether
it is repeated once more (`mixture.py`). The shuffle is a sort by a third key: every chunk is sorted alone and cut at
fixed keys, and an output shard collects one part of every chunk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from piledriver.core.random import Stream
from piledriver.corpus.dedup.arrays import open_array, write_arrays
from piledriver.corpus.dedup.clusters import cluster_rows
from piledriver.corpus.document import to_line
from piledriver.corpus.pipeline.catalogue import Catalogue, store_catalogue
from piledriver.corpus.pipeline.chunks import DOCUMENTS, LEVEL, number_chunks, read_chunk
from piledriver.corpus.pipeline.mixture import Share, budget_unit, compute_shares
from piledriver.corpus.pipeline.recipe import Recipe, source_name
from piledriver.corpus.pipeline.stage_registry import StageInput
from piledriver.corpus.pipeline.stages.near import duplicate_clusters
from piledriver.corpus.pipeline.tasks import Task, TaskResult, sibling_folder, work_folder
from piledriver.corpus.shards.writer import ShardFileWriter
from piledriver.corpus.text.token_counts import TokenCounter, tokenizer_checksum

SPLITS = ("train", "validation", "test")


def mix(corpus: StageInput, recipe: Recipe) -> tuple[dict[str, list[TaskResult]], dict[str, Share]]:
    """Return the finished shards of each split, and what each source was asked for and got."""
    executor, chunks = corpus.executor, number_chunks(corpus.chunks)
    labels = None
    if recipe.splits.validation + recipe.splits.test > 0:
        # Of the documents as they are after all stages: a stage that removes parts may have made two of them alike, and
        # the recipe may have deduplicated some sources only, or none.
        labels = duplicate_clusters(StageInput(executor, chunks, corpus.memory_bytes)).key
    measured = list(executor.map(_measure_tasks(recipe, corpus, labels)))
    shares = compute_shares(recipe, chunks, measured)
    outputs: dict[str, list[TaskResult]] = {}
    for number, split in enumerate(SPLITS):
        if number == 0:
            size = sum(share.got_bytes for share in shares.values())
        else:
            size = sum(result.values["bytes"][number] for result in measured)
        shards = max(1, round(size / recipe.shard_bytes)) if size else 0

        def tasks(number: int = number, shards: int = shards) -> Iterator[Task]:
            for chunk, result in zip(chunks, measured, strict=True):
                share = shares[chunk.source]
                # Held-out documents are not repeated.
                full, threshold = (share.full, share.threshold) if number == 0 else (1, -1)
                amount = {"split": number, "full": full, "threshold": threshold}
                common = {"chunk": chunk.key, "measured": result.key, "shards": shards, "seed": recipe.seed}
                yield Task.call(scatter_chunk, **common, **amount)

        if not shards:
            outputs[split] = []
            continue
        listed = ((result.key, 0, result.values["documents"]) for result in executor.map(tasks()))
        scattered = store_catalogue(executor, listed)
        gathered = (Task.call(gather_shard, scattered=scattered, shard=shard) for shard in range(shards))
        outputs[split] = list(executor.map(gathered))
    return outputs, shares


def _measure_tasks(recipe: Recipe, corpus: StageInput, labels: str | None) -> Iterator[Task]:
    splits = {"validation": recipe.splits.validation, "test": recipe.splits.test, "seed": recipe.seed}
    checksum = {} if recipe.tokenizer is None else {"tokenizer": tokenizer_checksum(recipe.tokenizer)}
    counted = {source_name(entry) for entry in recipe.sources if budget_unit(recipe, entry) == "tokens"}
    for chunk in number_chunks(corpus.chunks):
        common = {"chunk": chunk.key, "first": chunk.first, "labels": labels, **splits}
        if chunk.source in counted:
            yield Task.call(measure_chunk, **common, **checksum, payload=recipe.tokenizer)
        else:
            yield Task.call(measure_chunk, **common)


def measure_chunk(
    folder: str,
    chunk: str,
    first: int,
    labels: str | None,
    validation: float,
    test: float,
    seed: int,
    tokenizer: str | None = None,
    payload: str | None = None,
) -> dict[str, Any]:
    """Write the size, split, selection key and identity of each document of a chunk (a task).

    With a `tokenizer` (its checksum, and its path as the payload) also the number of tokens of each.
    """
    counter = None if tokenizer is None else TokenCounter(str(payload), tokenizer)
    sizes, tokens, identities = [], [], []
    for document in read_chunk(folder, chunk):
        text = document.text.encode("utf-8", "replace")
        sizes.append(len(text))
        if counter is not None:
            tokens.append(counter.count(text.decode()))
        identities.append(int(document.id[:16], 16))
    identity = np.array(identities, np.uint64)
    # All documents of a cluster draw by the ordinal of its first.
    drawn = np.arange(first, first + len(sizes), dtype=np.uint64)
    if labels is not None:
        rows = cluster_rows(sibling_folder(folder, labels), first, len(sizes))
        drawn[(rows[:, 0] - np.uint64(first)).astype(np.int64)] = rows[:, 1]
    uniform = Stream(seed, "split").uniforms(drawn)
    split = np.where(uniform < validation, 1, np.where(uniform < validation + test, 2, 0)).astype(np.uint8)
    amounts = {"bytes": np.array(sizes, np.uint64)}
    if counter is not None:
        amounts["tokens"] = np.array(tokens, np.uint64)
    choice = Stream(seed, "choose").bits(identity)
    write_arrays(folder, **amounts, split=split, choice=choice, identity=identity)
    return {unit: [int(amount[split == i].sum()) for i in range(3)] for unit, amount in amounts.items()}


def scatter_chunk(
    folder: str, chunk: str, measured: str, split: int, full: int, threshold: int, shards: int, seed: int
) -> dict[str, Any]:
    """Write the lines of a chunk that go into a split, sorted by shuffle key and cut by output shard (a task)."""
    splits, choice, identity = (
        np.array(open_array(sibling_folder(folder, measured), name)) for name in ("split", "choice", "identity")
    )
    inside = splits == split
    copies = np.where(inside, full + (choice <= np.uint64(threshold)), 0) if threshold >= 0 else inside * full
    which = np.repeat(np.arange(len(copies)), copies)
    copy = np.concatenate([np.arange(count) for count in copies]) if len(which) else np.empty(0, np.int64)
    keys = np.empty(len(which), np.uint64)
    for number in range(int(copies.max(initial=0))):
        keys[copy == number] = Stream(seed, "shuffle", number).bits(identity[which[copy == number]])
    order = np.argsort(keys, kind="stable")
    lines = [to_line(document) for document in read_chunk(folder, chunk)]
    ends = np.searchsorted(keys[order], np.array([(i << 64) // shards for i in range(1, shards)], np.uint64)).tolist()
    bounds = [0, *ends, len(order)]
    with open(os.path.join(folder, "lines"), "wb") as out:
        offsets = [0]
        compressor = zstandard.ZstdCompressor(level=LEVEL)
        for low, high in pairwise(bounds):
            if low < high:
                out.write(compressor.compress(b"".join([lines[which[i]] for i in order[low:high]])))
            offsets.append(out.tell())
    write_arrays(folder, keys=keys[order], bounds=np.array(bounds), offsets=np.array(offsets))
    return {"documents": len(which)}


def gather_shard(folder: str, scattered: str, shard: int) -> dict[str, Any]:
    """Write one output shard: its part of every chunk, sorted by shuffle key (a task)."""
    keys: list[npt.NDArray[np.uint64]] = []
    lines: list[bytes] = []
    for run in Catalogue(work_folder(folder), scattered).runs():
        low, high = open_array(run.folder, "bounds")[shard : shard + 2].tolist()
        begin, end = open_array(run.folder, "offsets")[shard : shard + 2].tolist()
        keys.append(np.array(open_array(run.folder, "keys")[low:high]))
        with open(os.path.join(run.folder, "lines"), "rb") as part:
            part.seek(begin)
            if begin < end:
                lines += zstandard.decompress(part.read(end - begin)).splitlines(keepends=True)
    order = np.argsort(np.concatenate(keys), kind="stable")
    with ShardFileWriter(os.path.join(folder, DOCUMENTS)) as writer:
        for at in order:
            writer.write_line(lines[at])
    summary = writer.summary
    return {"documents": summary.documents, "bytes": summary.compressed_bytes, "sha256": summary.sha256}
