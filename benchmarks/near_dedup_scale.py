"""Near-duplicates of many short synthetic documents: seconds, memory of all processes, disk, and whether all are found.

    python benchmarks/near_dedup_scale.py [--documents 200000] [--workers 2] [--folder DIR]

`corpus dedup` as a user runs it, from shards to shards. Documents have 60 to 100 words of a vocabulary of 50,000; a
tenth are exact copies of earlier ones, a tenth edits of two words. What an edit's true Jaccard similarity is (5-word
shingles) follows from its places, so recall is over the pairs of 0.8 and more. Memory is sampled every 50 ms over the
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
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq

from piledriver.corpus import ShardWriter

BLOCK = 10_000
COPY = 1
BUDGET_BYTES = 2 << 30


def write(documents: int, folder: Path) -> tuple[int, int]:
    """Write the shards; returns how many exact copies there are and how many edits that must be found.

    Copies and edits are of the document before. An id says what it is: a copy's ends in "c", that of an edit of
    similarity 0.8 or more in "e".
    """
    vocabulary = [f"{a}{b}{c}" for a in "bcdfghjklm" for b in "aeiou" for c in range(1000)]
    found = {"c": 0, "e": 0, "n": 0, "x": 0}
    with ShardWriter(folder, shard_bytes=1 << 28, level=1) as writer:
        for block in range(-(-documents // BLOCK)):
            luck = np.random.default_rng(block)
            count = min(BLOCK, documents - block * BLOCK)
            kinds = luck.choice(3, count, p=[0.8, 0.1, 0.1]).tolist()
            lengths = luck.integers(60, 101, count).tolist()
            drawn = luck.integers(0, len(vocabulary), (count, 100)).tolist()
            edits = luck.integers(0, 1 << 30, (count, 4)).tolist()
            words: list[str] = []
            for at, (kind, length, numbers, edit) in enumerate(zip(kinds, lengths, drawn, edits, strict=True)):
                mark = "n"
                if kind == 0 or not words:
                    words = [vocabulary[number] for number in numbers[:length]]
                elif kind == COPY:
                    mark = "c"
                else:
                    places = edit[0] % len(words), edit[1] % len(words)
                    words = list(words)
                    for place, number in zip(places, edit[2:], strict=True):
                        words[place] = f"edit{number}"
                    mark = "e" if _jaccard(len(words), places) >= 0.8 else "x"
                found[mark] += 1
                text = " ".join(words)
                meta = f'{{"pile_set_name":"Synthetic","id":"{block * BLOCK + at:012d}{mark}"}}'
                writer.write_line(f'{{"text":"{text}","meta":{meta}}}\n'.encode())
    return found["c"], found["e"]


def _jaccard(words: int, edited: tuple[int, int]) -> float:
    """The similarity of two texts without repeated shingles of 5 words, of which one has edits at two places."""
    touched = {shingle for place in edited for shingle in range(max(0, place - 4), min(place, words - 5) + 1)}
    shared = words - 4 - len(touched)
    return shared / (words - 4 + len(touched))


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
        "import sys\nfrom piledriver.corpus.pipeline.deduplicate import deduplicate\n"
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
