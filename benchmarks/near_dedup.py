"""Near-duplicates end to end per CPU-second, and how right they are.

    python benchmarks/near_dedup.py [--documents 12000] [--rounds 3]

From shards in to shards out (read, shingle, sign, band, cluster, verify, write at zstd level 3), in turns with rensa
(Python shingles, its signatures, a dictionary of bands, union-find) and datatrove (its four stages, on a twentieth of
the documents), where they are installed; medians over the rounds. Ours is `corpus dedup` whole, with checksums, ledger
and manifest, its tasks run in this process so that one clock sees all of them.

Speed is of code and documentation, mean 5.4 KB: a tenth exact copies, a fifth edits of others (1 to 10 % of the words
changed, two halves swapped, or boilerplate around).

Quality is of prose and code apart, with edits from another seed: prose from `../shared/text` (books, law, parliament,
...) in pieces of 5.4 KB, all of them as they are, and as many pieces of code. The true Jaccard similarity is that of
the sets of sequences of 5 words between white space, in lower case. Recall is over edited pairs of 0.8 and more; a
reported pair (kept, dropped) is right from 0.7 on. `dropped_at` is the share of dropped documents among edited pairs by
true similarity. rensa is judged twice: as it is, and with our check (a candidate is a duplicate from an estimated
similarity of 0.75 on).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

from corpus_texts import PIECE, pieces

from piledriver.corpus import ShardFileWriter, make_document, read_shards
from piledriver.corpus.dedup.arrays import open_array
from piledriver.corpus.pipeline import deduplicate
from piledriver.corpus.pipeline.tasks import Task, TaskResult, execute_task

REAL_TEXT = Path(__file__).resolve().parents[2] / "shared" / "text"
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


def with_duplicates(base: list[str], count: int, seed: int) -> tuple[list[str], dict[int, int]]:
    """Texts, and the origin of each copy and edit."""
    luck = random.Random(seed)
    texts, origin = list(base), {}
    for kind, share in (("copy", 0.1), ("edit", 0.2)):
        for _ in range(int(count * share)):
            source = luck.randrange(len(base))
            origin[len(texts)] = source
            texts.append(base[source] if kind == "copy" else edited(base[source], luck))
    return texts, origin


def prose() -> list[str]:
    """Pieces of real prose in a fixed order, where there is some."""
    if not REAL_TEXT.exists():
        return []
    long = (document.text for document in read_shards(REAL_TEXT) if "code" not in document.source.lower())
    return [text[at : at + PIECE] for text in long for at in range(0, len(text) - PIECE // 2, PIECE)]


def shingles(text: str) -> list[str]:
    words = text.lower().split()
    return [" ".join(words[at : at + 5]) for at in range(max(1, len(words) - 4))]


def jaccard(one: str, two: str) -> float:
    first, second = set(shingles(one)), set(shingles(two))
    return len(first & second) / max(1, len(first | second))


class InProcess:
    """An executor without processes, so that one CPU clock sees everything."""

    def __init__(self, work: str) -> None:
        self.work = work
        self.tasks: list[Task] = []

    def map(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        for task in tasks:
            self.tasks.append(task)
            yield execute_task((self.work, task))


def ours(shard: Path, folder: Path) -> Pairs:
    """`corpus dedup`, every file synced."""
    executor = InProcess(str(folder / "out" / ".work"))
    with mock.patch.object(deduplicate, "open_executor", return_value=nullcontext(executor)):
        deduplicate.deduplicate([str(shard)], str(folder / "out"), "near", {}, keep_work=True)
    labels = next(task for task in executor.tasks if task.function.endswith(":write_clusters"))
    clusters = open_array(os.path.join(executor.work, labels.key[:2], labels.key), "clusters")
    return [(first, member) for member, first in clusters.tolist() if first != member]


def with_rensa(shard: Path, folder: Path, check: float = 0.0) -> Pairs:
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
    signed = []
    for number, document in enumerate(documents):
        minhash = RMinHash(num_perm=bands * rows, seed=42)
        minhash.update(shingles(document.text))
        digest = minhash.digest()
        parents.append(number)
        if check:
            signed.append(minhash)
        for band, bucket in enumerate(buckets):
            other = bucket.setdefault(tuple(digest[band * rows : band * rows + rows]), number)
            one, two = root(other), root(number)
            if one != two and (not check or minhash.jaccard(signed[other]) >= check):
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


def timed(work: Callable[..., Pairs], texts: list[str]) -> tuple[float, Pairs]:
    """(documents a CPU-second, pairs) of one run."""
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "in.jsonl.zst"
        with ShardFileWriter(shard) as writer:
            for number, text in enumerate(texts):
                writer.write(make_document(text, source="Bench", origin=str(number)))
        start = time.process_time()
        pairs = work(shard, Path(folder))
        return len(texts) / (time.process_time() - start), pairs


def quality(pairs: Pairs, texts: list[str], origin: dict[int, int]) -> dict:
    """Recall, precision, and the share of dropped edits by true similarity."""
    kept = {number: number for number in range(len(texts))} | {number: first for first, number in pairs}
    edits = {(o, n): jaccard(texts[o], texts[n]) for n, o in origin.items() if texts[o] != texts[n]}
    alike = [pair for pair, similarity in edits.items() if similarity >= 0.8]
    right = sum(jaccard(texts[a], texts[b]) >= 0.7 for a, b in pairs)
    dropped_at = {}
    for low in (0.6, 0.65, 0.7, 0.75, 0.8):
        band = [pair for pair, similarity in edits.items() if low <= similarity < low + 0.05]
        dropped_at[f"{low:.2f}"] = f"{sum(kept[o] == kept[n] for o, n in band)}/{len(band)}"
    return {
        "recall": round(sum(kept[o] == kept[n] for o, n in alike) / max(1, len(alike)), 4),
        "labelled_pairs": len(alike),
        "precision": round(right / max(1, len(pairs)), 4),
        "reported_pairs": len(pairs),
        "dropped_at": dropped_at,
    }


def judged(documents: int, names: Iterable[str]) -> dict:
    """Quality of prose and of code, for each pipeline that is installed."""
    figures: dict = {}
    held_out = prose()
    for kind, base in (("prose", held_out), ("code", list(islice(pieces(), 20_000, 20_000 + len(held_out))))):
        if base:
            texts, origin = with_duplicates(base, documents, seed=20261115)
            works = {name: QUALITY[name] for name in QUALITY if name.partition(" ")[0] in names}
            found = {name: quality(timed(work, texts)[1], texts, origin) for name, work in works.items()}
            figures[kind] = {"documents": len(texts), **found}
    return figures


PIPELINES: dict[str, tuple[Callable[..., Pairs], float]] = {
    "ours": (ours, 1.0),
    "rensa": (with_rensa, 1.0),
    "datatrove": (with_datatrove, 0.05),
}


QUALITY: dict[str, Callable[..., Pairs]] = {
    "ours": ours,
    "rensa": with_rensa,
    "rensa with our check": partial(with_rensa, check=0.75),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=12_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    texts, _ = with_duplicates(list(islice(pieces(), int(args.documents * 0.7))), args.documents, seed=0)
    random.Random(1).shuffle(texts)
    timed(ours, texts[:50])
    rates: dict[str, list[float]] = {name: [] for name in PIPELINES}
    missing: dict[str, str] = {}
    for _ in range(args.rounds):
        for name, (work, share) in PIPELINES.items():
            try:
                rates[name].append(timed(work, texts[: int(len(texts) * share)])[0])
            except ImportError as error:
                missing[name] = f"not run: {error}"
    medians = {name: round(statistics.median(rate), 1) for name, rate in rates.items() if rate}
    # datatrove's quality would take an hour on this many documents; the facts of its preset are in docs/corpus.md.
    print(
        json.dumps(
            {
                "row": "near duplicates end to end, documents a CPU-second",
                "documents": len(texts),
                "mean_bytes": round(sum(len(text.encode()) for text in texts) / len(texts)),
                "ours": medians["ours"],
                "peer": {name: medians.get(name, missing.get(name)) for name in PIPELINES if name != "ours"},
                "ratio": {n: round(medians["ours"] / rate, 2) for n, rate in medians.items() if n != "ours"},
                "all_rounds": {name: [round(rate) for rate in found] for name, found in rates.items()},
                "quality": judged(args.documents, medians) or "no text to judge by",
                "limit": {
                    "documents_per_cpu_second": 5000,
                    "rensa": 2,
                    "datatrove": 50,
                    "recall": 0.95,
                    "precision": 0.99,
                },
                "load": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
