"""Epochs, splits and the global shuffle, exactly as asked and in bounded memory.

Nothing is sampled with luck: each document has random keys of its own, pure functions of the seed and its id. A source
that is asked for 2.5 times goes in twice whole, and a third time with those documents whose key is under the threshold
that gives half of its bytes. The shuffle is a sort by another key: every chunk is sorted alone and cut at fixed keys,
and an output shard collects one cut of every chunk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core.random import Stream
from piledriver.corpus.assembly.catalogue import ARRAYS, Catalogue, catalogued
from piledriver.corpus.assembly.chunks import DOCUMENTS, Chunk
from piledriver.corpus.assembly.executors import Executor
from piledriver.corpus.assembly.steps import cluster_rows
from piledriver.corpus.assembly.tasks import Done, Task, task_folder, work_of
from piledriver.corpus.dedup.arrays import ArrayFile, write_arrays
from piledriver.corpus.document import to_line
from piledriver.corpus.recipe import Recipe, source_name
from piledriver.corpus.shard_reader import read_shards
from piledriver.corpus.shard_writer import ShardFileWriter

UInt64Array = npt.NDArray[np.uint64]
SPLITS = ("train", "validation", "test")
_HERE = "piledriver.corpus.assembly.mix"
_BINS = 1 << 12


@dataclass(frozen=True)
class Share:
    """How much of a source goes into training: `full` whole copies, and documents up to `threshold` once more."""

    asked_bytes: float
    got_bytes: int
    full: int
    threshold: int


def measure(
    folder: str, chunk: str, first: int, labels: str | None, validation: float, test: float, seed: int
) -> dict[str, Any]:
    """Of each document in a chunk: bytes of text, the split it falls into, the key that chooses it, its identity."""
    sizes, identities = [], []
    for document in read_shards(os.path.join(task_folder(work_of(folder), chunk), DOCUMENTS)):
        sizes.append(len(document.text.encode("utf-8", "replace")))
        identities.append(int(document.id[:16], 16))
    identity = np.array(identities, np.uint64)
    # A cluster of near-duplicates is drawn as one: by the ordinal of its first document.
    drawn = np.arange(first, first + len(sizes), dtype=np.uint64)
    if labels is not None:
        rows = cluster_rows(os.path.join(task_folder(work_of(folder), labels), ARRAYS), first, len(sizes))
        drawn[(rows[:, 0] - np.uint64(first)).astype(np.int64)] = rows[:, 1]
    luck = Stream(seed, "split").uniforms(drawn)
    split = np.where(luck < validation, 1, np.where(luck < validation + test, 2, 0)).astype(np.uint8)
    write_arrays(
        os.path.join(folder, ARRAYS),
        sizes=np.array(sizes, np.uint64),
        split=split,
        choice=Stream(seed, "choose").bits(identity),
        identity=identity,
    )
    return {"bytes": [int(np.array(sizes, np.uint64)[split == i].sum()) for i in range(3)]}


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
    common = {
        "labels": labels.key if labels else None,
        "validation": recipe.splits.validation,
        "test": recipe.splits.test,
    }
    measured = list(
        executor.map(
            Task(f"{_HERE}:measure", {"chunk": chunk.key, "first": chunk.first, **common, "seed": recipe.seed})
            for chunk in chunks
        )
    )
    shares = _shares(recipe, chunks, measured)
    outputs: dict[str, list[Done]] = {}
    for number, split in enumerate(SPLITS):
        size = (
            sum(s.got_bytes for s in shares.values())
            if number == 0
            else sum(d.result["bytes"][number] for d in measured)
        )
        if not size:
            outputs[split] = []
            continue
        shards = max(1, round(size / recipe.shard_bytes))

        def tasks(number: int = number, shards: int = shards) -> Iterator[Task]:
            for chunk, done in zip(chunks, measured, strict=True):
                share = shares[chunk.source] if number == 0 else Share(0, 0, 1, -1)
                arguments = {"chunk": chunk.key, "measured": done.key, "split": number, "full": share.full}
                yield Task(
                    f"{_HERE}:scatter",
                    {**arguments, "threshold": share.threshold, "shards": shards, "seed": recipe.seed},
                )

        scattered = catalogued(executor, ((done.key, 0, done.result["documents"]) for done in executor.map(tasks())))
        gathered = (Task(f"{_HERE}:gather", {"scattered": scattered, "shard": shard}) for shard in range(shards))
        outputs[split] = list(executor.map(gathered))
    return outputs, shares


def _shares(recipe: Recipe, chunks: Sequence[Chunk], measured: Sequence[Done]) -> dict[str, Share]:
    total_weight = sum(entry.weight or 0 for entry in recipe.sources)
    shares = {}
    for entry in recipe.sources:
        name = source_name(entry)
        files = [done.path(ARRAYS) for chunk, done in zip(chunks, measured, strict=True) if chunk.source == name]
        size = sum(
            done.result["bytes"][0] for chunk, done in zip(chunks, measured, strict=True) if chunk.source == name
        )
        if entry.bytes is not None:
            asked = float(entry.bytes)
        elif entry.weight is not None:
            asked = (recipe.total_bytes or 0) * entry.weight / total_weight
        else:
            asked = size * (1.0 if entry.epochs is None else entry.epochs)
        full = int(asked // size) if size else 0
        threshold, extra = choose(files, asked - full * size) if size else (-1, 0)
        shares[name] = Share(asked, full * size + extra, full, threshold)
    return shares


def choose(files: Sequence[str], wanted: float) -> tuple[int, int]:
    """(threshold, bytes): the documents with keys up to the threshold have as nearly the wanted bytes as can be.

    Two passes over the files in bounded memory: bytes by bins of keys, then the keys of the one bin that decides.
    """
    bins = np.zeros(_BINS, np.uint64)
    for choice, sizes in map(_choices, files):
        np.add.at(bins, (choice >> np.uint64(52)).astype(np.int64), sizes)
    before = np.concatenate([[0], np.cumsum(bins, dtype=np.uint64)]).astype(np.int64)
    deciding = int(np.clip(np.searchsorted(before, wanted, side="right") - 1, 0, _BINS - 1))
    keys, amounts = [], []
    for choice, sizes in map(_choices, files):
        mine = (choice >> np.uint64(52)) == deciding
        keys.append(choice[mine])
        amounts.append(sizes[mine])
    key, amount = np.concatenate(keys), np.concatenate(amounts)
    order = np.argsort(key, kind="stable")
    # Totals after taking none, one, two, ... documents of the bin: the nearest to what is wanted wins.
    totals = int(before[deciding]) + np.concatenate([[0], np.cumsum(amount[order].astype(np.int64))])
    taken = int(np.abs(totals - wanted).argmin())
    threshold = int(key[order[taken - 1]]) if taken else (deciding << 52) - 1
    return threshold, int(totals[taken])


def _choices(path: str) -> tuple[UInt64Array, UInt64Array]:
    file = ArrayFile(path)
    train = file.whole("split") == 0
    return file.whole("choice")[train], file.whole("sizes")[train]
