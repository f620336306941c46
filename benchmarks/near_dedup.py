"""Near-duplicates end to end (read, shingle, sign, band, cluster, write) per CPU-second, and how right they are.

    python benchmarks/near_dedup.py [--documents 12000]

Against rensa (Python shingles, its signatures, a dictionary of bands, union-find) and datatrove (its four stages), in
this run, where they are installed. A tenth of the documents are exact copies, a fifth edits of others: 1 to 10 % of the
words changed, two halves swapped, or boilerplate around. Texts that share a fifth of their shingles with earlier ones
are not taken, so that the labels are all there is to find. Recall is over the edited pairs with a true Jaccard
similarity (5-word shingles) of 0.8 and more; a reported pair is right from 0.7 on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from corpus_texts import pieces

from piledriver.corpus import ShardFileWriter, make_document, read_shards
from piledriver.corpus.assembly import stages
from piledriver.corpus.assembly.chunks import Chunk
from piledriver.corpus.assembly.dedup import read_chunks
from piledriver.corpus.assembly.tasks import Done, Task, run_task
from piledriver.corpus.dedup.arrays import ArrayFile
from piledriver.corpus.dedup.minhash import PRESETS
from piledriver.corpus.words import Words

Pairs = list[tuple[int, int]]


def edited(text: str, luck: random.Random) -> str:
    kind = luck.randrange(6)
    if kind == 0:
        middle = text.find("\n", len(text) // 2)
        return text[middle + 1 :] + "\n" + text[: middle + 1]
    if kind == 1:
        return f"Home | About | Contact {luck.random()}\n{text}\nAll rights reserved, page {luck.random()}"
    words = text.split(" ")
    for at in luck.sample(range(len(words)), max(1, int(len(words) * luck.uniform(0.01, 0.1)))):
        words[at] = f"edit{luck.randrange(1000)}"
    return " ".join(words)


def make_corpus(count: int) -> tuple[list[str], dict[int, int]]:
    """Texts, and the origin of each copy and edit."""
    luck = random.Random(0)
    base = list(islice(_unlike(pieces()), int(count * 0.7)))
    texts, origin = list(base), {}
    for kind, share in (("copy", 0.1), ("edit", 0.2)):
        for _ in range(int(count * share)):
            source = luck.randrange(len(base))
            origin[len(texts)] = source
            texts.append(base[source] if kind == "copy" else edited(base[source], luck))
    return texts, origin


def _unlike(texts: Iterable[str]) -> Iterator[str]:
    seen: set[bytes] = set()
    for text in texts:
        mine = shingles(text)
        if len(mine & seen) < 0.2 * len(mine):
            yield text
        seen |= mine


def shingles(text: str) -> set[bytes]:
    hashes = Words(text).hashes
    if len(hashes) < 5:
        return {hashes.tobytes()}
    return {row.tobytes() for row in np.lib.stride_tricks.sliding_window_view(hashes, 5)}


def jaccard(one: str, two: str) -> float:
    first, second = shingles(one), shingles(two)
    return len(first & second) / max(1, len(first | second))


class InProcess:
    """An executor without processes, so that one CPU clock sees everything."""

    def __init__(self, work: str) -> None:
        self.work = work
        self.tasks: list[Task] = []

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        for task in tasks:
            self.tasks.append(task)
            yield run_task((self.work, task))


def ours(executor: InProcess, chunks: list[Chunk]) -> Pairs:
    """The near stage of a build as it is: chunk files in, chunk files and ledger out, every file synced."""
    stages.near(executor, chunks, PRESETS["piledriver"], 2 << 30)
    labels = next(task for task in executor.tasks if task.function.endswith(":label_clusters"))
    file = ArrayFile(os.path.join(executor.work, labels.key[:2], labels.key, "arrays"))
    found = zip(file.whole("members").tolist(), file.whole("firsts").tolist(), strict=True)
    return [(first, member) for member, first in found if first != member]


def with_rensa(shard: Path, folder: Path) -> Pairs:
    from rensa import RMinHash

    bands, rows = 20, 6
    parents: list[int] = []
    buckets: list[dict[tuple[int, ...], int]] = [{} for _ in range(bands)]

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    documents = list(read_shards(shard))
    for number, document in enumerate(documents):
        words = document.text.lower().split()
        grams = [" ".join(words[at : at + 5]) for at in range(max(1, len(words) - 4))]
        minhash = RMinHash(num_perm=bands * rows, seed=42)
        minhash.update(grams)
        digest = minhash.digest()
        parents.append(number)
        for band, bucket in enumerate(buckets):
            other = bucket.setdefault(tuple(digest[band * rows : band * rows + rows]), number)
            one, two = root(other), root(number)
            parents[max(one, two)] = min(one, two)
    with ShardFileWriter(folder / "rensa.jsonl.zst") as out:
        for number, document in enumerate(documents):
            if root(number) == number:
                out.write(document)
    return [(root(number), number) for number in range(len(documents)) if root(number) != number]


def with_datatrove(shard: Path, folder: Path) -> Pairs:
    from datatrove.data import Document as TheirDocument
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.writers.jsonl import JsonlWriter
    from datatrove.utils.logging import logger

    logger.remove()
    names = [str(folder / name) for name in ("signatures", "buckets", "remove", "out")]

    def documents() -> Iterator[TheirDocument]:
        return (TheirDocument(text=d.text, id=str(n)) for n, d in enumerate(read_shards(shard)))

    list(MinhashDedupSignature(output_folder=names[0]).run(documents(), 0, 1) or [])
    for bucket in range(14):
        list(MinhashDedupBuckets(names[0], names[1]).run(None, bucket, 14) or [])
    list(MinhashDedupCluster(names[1], names[2], save_cluster_id=True).run(None, 0, 1) or [])
    writer = JsonlWriter(names[3], compression=None)
    kept_of: dict[int, int] = {}
    removed: list[tuple[int, int]] = []
    seen: set[str] = set()
    tagged = MinhashDedupFilter(names[2], load_cluster_ids=True).run(_seen(documents(), seen_documents := []), 0, 1)
    with writer:
        for document in tagged:
            writer.write(document, 0)
            seen.add(document.id)
    for document in seen_documents:
        cluster = document.metadata.get("minhash_cluster_id")
        if cluster not in (None, -1):
            if document.id in seen:
                kept_of[cluster] = int(document.id)
            else:
                removed.append((cluster, int(document.id)))
    return [(kept_of[cluster], number) for cluster, number in removed if cluster in kept_of]


def _seen(documents: Iterator, into: list) -> Iterator:
    for document in documents:
        into.append(document)
        yield document


def measured(name: str, work: Callable[..., Pairs], texts: list[str], origin: dict[int, int]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "in.jsonl.zst"
        with ShardFileWriter(shard) as writer:
            for number, text in enumerate(texts):
                writer.write(make_document(text, source="Bench", origin=str(number)))
        work_folder = Path(folder) / name
        work_folder.mkdir()
        given: tuple[object, ...] = (shard, work_folder)
        if work is ours:
            executor = InProcess(str(work_folder))
            given = (executor, read_chunks(executor, [str(shard)], ["benchmark"]).chunks)
        start = time.process_time()
        pairs = work(*given)
        seconds = time.process_time() - start
    kept = {number: number for number in range(len(texts))} | {number: first for first, number in pairs}
    labelled = [(o, n, jaccard(texts[o], texts[n])) for n, o in origin.items() if texts[o] != texts[n]]
    alike = [(o, n) for o, n, similarity in labelled if similarity >= 0.8]
    found = sum(kept[o] == kept[n] for o, n in alike)

    right = sum(jaccard(texts[a], texts[b]) >= 0.7 for a, b in pairs)
    return {
        "documents_per_cpu_second": round(len(texts) / seconds, 1),
        "recall": round(found / max(1, len(alike)), 4),
        "precision": round(right / max(1, len(pairs)), 4),
        "labelled_pairs": len(alike),
        "reported_pairs": len(pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=12_000)
    count = parser.parse_args().documents
    texts, origin = make_corpus(count)
    measured("warm", ours, texts[:50], {})
    mine = measured("ours", ours, texts, origin)
    peers: dict[str, object] = {}
    for name, work, share in (("rensa", with_rensa, 1.0), ("datatrove", with_datatrove, 0.05)):
        few, few_origin = (texts, origin) if share == 1.0 else make_corpus(int(count * share))
        try:
            peers[name] = measured(name, work, few, few_origin)
        except ImportError as error:
            peers[name] = f"not run: {error}"
    rate = mine["documents_per_cpu_second"]
    ratios = {
        name: round(rate / peer["documents_per_cpu_second"], 1)
        for name, peer in peers.items()
        if isinstance(peer, dict)
    }
    print(
        json.dumps(
            {
                "row": "near duplicates end to end, one core",
                "documents": len(texts),
                "mean_bytes": round(sum(len(t.encode()) for t in texts) / len(texts)),
                "ours": mine,
                "peer": peers,
                "ratio": ratios,
                "limit": {"documents_per_cpu_second": 5000, "recall": 0.95, "precision": 0.99},
            }
        )
    )


if __name__ == "__main__":
    main()
