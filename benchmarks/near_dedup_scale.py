"""Near-duplicates of many short synthetic documents: seconds, memory of all processes together, disk; and are all found.

    python benchmarks/near_dedup_scale.py [--documents 200000] [--workers 2] [--folder DIR]

`corpus dedup` as a user runs it, from shards to shards. Documents have 60 to 100 words of a vocabulary of 50,000; a
tenth are exact copies of earlier ones, a tenth edits of two words. What is an edit's true Jaccard similarity (5-word
shingles) is computed for each, so recall is over the pairs of 0.8 and more. Memory is sampled every 50 ms over the
command and its workers: what each holds for itself (resident less shared), and their proportional set sizes, which
count pages of mapped files too, however many the system lets stay.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq

from piledriver.corpus import Document, ShardWriter

BLOCK = 10_000
COPY, EDIT = 1, 2
BUDGET_BYTES = 2 << 30


def blocks(documents: int) -> Iterator[tuple[int, list[list[str]], np.ndarray]]:
    """(number of the first, words of each document, kind of each); copies and edits are of the document before."""
    vocabulary = np.array([f"{a}{b}{c}" for a in "bcdfghjklm" for b in "aeiou" for c in range(1000)])
    for block in range(-(-documents // BLOCK)):
        luck = np.random.default_rng(block)
        count = min(BLOCK, documents - block * BLOCK)
        kinds = luck.choice(3, count, p=[0.8, 0.1, 0.1])
        kinds[0] = 0
        lengths = luck.integers(60, 101, count)
        words = vocabulary[luck.integers(0, len(vocabulary), (count, 100))]
        texts: list[list[str]] = []
        for at in range(count):
            if kinds[at] == 0:
                texts.append(words[at, : lengths[at]].tolist())
                continue
            text = list(texts[at - 1])
            if kinds[at] == EDIT:
                for place in luck.choice(len(text), 2, replace=False):
                    text[place] = f"edit{luck.integers(1 << 30)}"
            texts.append(text)
        yield block * BLOCK, texts, kinds


def write(documents: int, folder: Path) -> tuple[int, int]:
    """Write the shards; returns how many exact copies there are and how many edits that must be found.

    A document's id says what it is: a copy's ends in "c", that of an edit of similarity 0.8 or more in "e".
    """
    copies = edits = 0
    with ShardWriter(folder, shard_bytes=1 << 28) as writer:
        for first, texts, kinds in blocks(documents):
            for at, (text, kind) in enumerate(zip(texts, kinds.tolist(), strict=True)):
                mark = "n"
                if kind == COPY:
                    mark, copies = "c", copies + 1
                elif kind == EDIT and _jaccard(text, texts[at - 1]) >= 0.8:
                    mark, edits = "e", edits + 1
                elif kind == EDIT:
                    mark = "x"
                writer.write(Document(" ".join(text), f"{first + at:012d}{mark}", "Synthetic"))
    return copies, edits


def _jaccard(one: list[str], two: list[str]) -> float:
    first, second = ({tuple(words[at : at + 5]) for at in range(len(words) - 4)} for words in (one, two))
    return len(first & second) / len(first | second)


def watch(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """The peaks of (memory held alone, proportional set size) of a process and its children, summed."""
    held = proportional = sample = 0
    while process.poll() is None:
        alone = shares = 0
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            break
        for member in family:
            try:
                memory = member.memory_info()
                alone += memory.rss - memory.shared
                if sample % 10 == 0:
                    shares += member.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        held, proportional = max(held, alone), max(proportional, shares)
        sample += 1
        time.sleep(0.05)
    return held, proportional


def disk_bytes(folder: Path) -> int:
    seen = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            status = path.stat()
            seen[status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


def measure(documents: int, workers: int, memory_bytes: int, folder: Path) -> dict[str, object]:
    copies, edits = write(documents, folder / "in")
    program = (
        "import sys\nfrom piledriver.corpus.assembly.dedup import deduplicate\n"
        "deduplicate([sys.argv[1]], sys.argv[2], 'near', {}, memory_bytes=int(sys.argv[3]), workers=int(sys.argv[4]))"
    )
    command = [sys.executable, "-c", program, str(folder / "in"), str(folder / "out"), str(memory_bytes), str(workers)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    held, proportional = watch(process)
    seconds = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.wait() != 0:
        raise SystemExit(f"the command failed with exit code {process.returncode}")
    # The workers are children of the command, which waits for them, so their time is in its children's.
    cpu = sum(getattr(after, name) - getattr(before, name) for name in ("ru_utime", "ru_stime"))
    found = {"c": 0, "e": 0, "x": 0, "n": 0}
    wrong = 0
    for batch in pq.ParquetFile(folder / "out" / "ledger.parquet").iter_batches(columns=["id", "kept"]):
        for gone, kept in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            found[gone[-1]] += 1
            # A chain of copies and edits begins with the last new document before it.
            wrong += not 0 <= int(gone[:-1]) - int(kept[:-1]) < 30
    return {
        "documents": documents,
        "cpu_seconds": round(cpu, 1),
        "seconds": round(seconds, 1),
        "microseconds_a_document": round(cpu / documents * 1e6, 1),
        "peak_mb_held_alone": round(held / 1e6),
        "peak_mb_proportional": round(proportional / 1e6),
        "disk_bytes_a_document_in": round(disk_bytes(folder / "in") / documents),
        "disk_bytes_a_document_work": round(disk_bytes(folder / "out") / documents),
        "recall_exact": round(found["c"] / max(1, copies), 6),
        "recall_edits": round(found["e"] / max(1, edits), 6),
        "edits_to_find": edits,
        "new_documents_dropped": found["n"],
        "kept_in_another_chain": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--memory-bytes", type=int, default=1 << 29, help="what one process may sort at a time")
    parser.add_argument("--folder", help="where to work; a temporary folder, removed afterwards, if not given")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        ours = measure(args.documents, args.workers, args.memory_bytes, Path(folder))
    row = {
        "row": "near duplicates of many short documents",
        "ours": ours,
        "peer": "none measured at this size",
        "limit": {"peak_mb_held_alone": BUDGET_BYTES // 10**6, "recall": 0.95},
        "load": os.getloadavg()[0],
        "workers": args.workers,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
