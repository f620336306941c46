"""Epochs, splits and the global shuffle, exactly as asked and in bounded memory.

Each document has random keys of its own, pure functions of the seed and its id: one draws its split, one chooses what
goes in once more (`shares.py`). The shuffle is a sort by another key: every chunk is sorted alone and cut at fixed
keys, and an output shard collects one cut of every chunk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core import storage
from piledriver.core.random import Stream
from piledriver.corpus.dedup.arrays import ArrayFile, write_arrays
from piledriver.corpus.document import to_line
from piledriver.corpus.pipeline.catalogue import ARRAYS, Catalogue, catalogued
from piledriver.corpus.pipeline.chunks import DOCUMENTS, Chunk
from piledriver.corpus.pipeline.executors import Executor
from piledriver.corpus.pipeline.mixture import Share, shares, unit_of
from piledriver.corpus.pipeline.recipe import Recipe, source_name
from piledriver.corpus.pipeline.stage_settings import unchanged
from piledriver.corpus.pipeline.steps import cluster_rows
from piledriver.corpus.pipeline.tasks import Done, Task, task_folder, work_of
from piledriver.corpus.shards.reader import read_shards
from piledriver.corpus.shards.writer import ShardFileWriter
from piledriver.corpus.text.token_counts import TokenCounter, tokenizer_file

UInt64Array = npt.NDArray[np.uint64]
SPLITS = ("train", "validation", "test")
_HERE = "piledriver.corpus.pipeline.mix"


def measure(
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
    """Of each document in a chunk: bytes of text, the split it falls into, the key that chooses it, its identity; and
    its tokens, where a tokenizer is given: its checksum, with its path as the payload."""
    counter = None if tokenizer is None else TokenCounter(unchanged(str(payload), tokenizer))
    sizes, tokens, identities = [], [], []
    for document in read_shards(os.path.join(task_folder(work_of(folder), chunk), DOCUMENTS)):
        text = document.text.encode("utf-8", "replace")
        sizes.append(len(text))
        if counter is not None:
            tokens.append(counter.count(text.decode()))
        identities.append(int(document.id[:16], 16))
    identity = np.array(identities, np.uint64)
    # A cluster of near-duplicates is drawn as one: by the ordinal of its first document.
    drawn = np.arange(first, first + len(sizes), dtype=np.uint64)
    if labels is not None:
        rows = cluster_rows(os.path.join(task_folder(work_of(folder), labels), ARRAYS), first, len(sizes))
        drawn[(rows[:, 0] - np.uint64(first)).astype(np.int64)] = rows[:, 1]
    luck = Stream(seed, "split").uniforms(drawn)
    split = np.where(luck < validation, 1, np.where(luck < validation + test, 2, 0)).astype(np.uint8)
    amounts = {"bytes": np.array(sizes, np.uint64)}
    if counter is not None:
        amounts["tokens"] = np.array(tokens, np.uint64)
    write_arrays(
        os.path.join(folder, ARRAYS),
        **amounts,
        split=split,
        choice=Stream(seed, "choose").bits(identity),
        identity=identity,
    )
    return {unit: [int(amount[split == i].sum()) for i in range(3)] for unit, amount in amounts.items()}


def scatter(
    folder: str, chunk: str, measured: str, split: int, full: int, threshold: int, shards: int, seed: int
) -> dict[str, Any]:
    """The copies of a chunk's documents that go into a split, sorted by their shuffle keys, cut by output shard."""
    file = ArrayFile(os.path.join(task_folder(work_of(folder), measured), ARRAYS))
    inside = file.whole("split") == split
    copies = (
        np.where(inside, full + (file.whole("choice") <= np.uint64(threshold)), 0) if threshold >= 0 else inside * full
    )
    identity = file.whole("identity")
    which = np.repeat(np.arange(len(copies)), copies)
    copy = np.concatenate([np.arange(count) for count in copies]) if len(which) else np.empty(0, np.int64)
    keys = np.empty(len(which), np.uint64)
    for number in range(int(copies.max(initial=0))):
        keys[copy == number] = Stream(seed, "shuffle", number).bits(identity[which[copy == number]])
    order = np.argsort(keys, kind="stable")
    lines = [
        to_line(document) for document in read_shards(os.path.join(task_folder(work_of(folder), chunk), DOCUMENTS))
    ]
    ends = np.searchsorted(keys[order], np.array([_edge(i, shards) for i in range(1, shards)], np.uint64)).tolist()
    bounds = [0, *ends, len(order)]
    with open(os.path.join(folder, "lines"), "wb") as out:
        offsets = [0]
        for low, high in pairwise(bounds):
            out.write(b"".join(lines[which[i]] for i in order[low:high]))
            offsets.append(out.tell())
    write_arrays(os.path.join(folder, ARRAYS), keys=keys[order], bounds=np.array(bounds), offsets=np.array(offsets))
    return {"documents": len(which)}


def gather(folder: str, scattered: str, shard: int) -> dict[str, Any]:
    """One output shard: its part of every chunk, in the order of the shuffle keys."""
    keys: list[UInt64Array] = []
    lines: list[bytes] = []
    for run in Catalogue(work_of(folder), scattered).runs():
        file = ArrayFile(run.path)
        low, high = file.rows("bounds", shard, shard + 2).tolist()
        begin, end = file.rows("offsets", shard, shard + 2).tolist()
        keys.append(file.rows("keys", low, high))
        with open(os.path.join(os.path.dirname(run.path), "lines"), "rb") as part:
            part.seek(begin)
            lines += part.read(end - begin).splitlines(keepends=True)
    order = np.argsort(np.concatenate(keys), kind="stable")
    with ShardFileWriter(os.path.join(folder, DOCUMENTS)) as writer:
        for at in order:
            writer.write_line(lines[at])
    summary = writer.summary
    return {"documents": summary.documents, "bytes": summary.compressed_bytes, "sha256": summary.sha256}


def _edge(shard: int, shards: int) -> int:
    return (shard << 64) // shards


def mix(
    executor: Executor, recipe: Recipe, chunks: list[Chunk], labels: Done | None
) -> tuple[dict[str, list[Done]], dict[str, Share]]:
    """The finished shards of each split, and what each source was asked for and got."""
    measured = list(executor.map(_measures(recipe, chunks, labels)))
    found = shares(recipe, chunks, measured)
    outputs: dict[str, list[Done]] = {}
    for number, split in enumerate(SPLITS):
        size = (
            sum(share.got_bytes for share in found.values())
            if number == 0
            else sum(d.result["bytes"][number] for d in measured)
        )
        if not size:
            outputs[split] = []
            continue
        shards = max(1, round(size / recipe.shard_bytes))

        def tasks(number: int = number, shards: int = shards) -> Iterator[Task]:
            for chunk, done in zip(chunks, measured, strict=True):
                # What is held out goes in once.
                full, threshold = (found[chunk.source].full, found[chunk.source].threshold) if number == 0 else (1, -1)
                arguments = {"chunk": chunk.key, "measured": done.key, "split": number, "full": full}
                yield Task(
                    f"{_HERE}:scatter", {**arguments, "threshold": threshold, "shards": shards, "seed": recipe.seed}
                )

        scattered = catalogued(executor, ((done.key, 0, done.result["documents"]) for done in executor.map(tasks())))
        gathered = (Task(f"{_HERE}:gather", {"scattered": scattered, "shard": shard}) for shard in range(shards))
        outputs[split] = list(executor.map(gathered))
    return outputs, found


def _measures(recipe: Recipe, chunks: list[Chunk], labels: Done | None) -> Iterator[Task]:
    common = {
        "labels": labels.key if labels else None,
        "validation": recipe.splits.validation,
        "test": recipe.splits.test,
        "seed": recipe.seed,
    }
    tokenizer = None if recipe.tokenizer is None else tokenizer_file(recipe.tokenizer)
    checksum = {} if tokenizer is None else {"tokenizer": storage.sha256(tokenizer)}
    counted = {source_name(entry) for entry in recipe.sources if unit_of(recipe, entry) == "tokens"}
    for chunk in chunks:
        arguments = {"chunk": chunk.key, "first": chunk.first, **common}
        if chunk.source in counted:
            yield Task(f"{_HERE}:measure", arguments | checksum, payload=tokenizer)
        else:
            yield Task(f"{_HERE}:measure", arguments)
