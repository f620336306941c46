"""Reading shards of text, one core, against what a user would take instead, in the same run.

    python benchmarks/shards.py [--megabytes 150] [--documents 10000000]

The limit is decompressing (zstandard, streaming) and parsing (a simdjson loop over the lines, text only) one after the
other. Figures are characters of text per CPU-second. One big file read by two processes from its frames is wall time.
With `--documents` only the opening of a file of so many (short) documents is measured, at its first and its last one.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zstandard

from piledriver.corpus import ShardFileWriter, make_document, read_shards, read_texts

REAL_TEXT = Path(__file__).resolve().parents[2] / "shared" / "text"
REPEATS = 3


def write_corpus(path: Path, megabytes: int) -> int:
    """Documents of about 5.4 KB, of real text where there is some, else of random words; returns the characters."""
    luck = random.Random(0)
    words = ["".join(luck.choices("etaoinshrdlu", k=luck.randint(2, 9))) for _ in range(20_000)]
    texts: Iterator[str] = (
        (document.text for document in read_shards(REAL_TEXT))
        if REAL_TEXT.exists()
        else iter(lambda: " ".join(luck.choices(words, k=900)), "")
    )
    pieces = [text[i : i + 5400] for text in _until(texts, megabytes * 1_000_000) for i in range(0, len(text), 5400)]
    characters = 0
    with ShardFileWriter(path) as shard:
        while characters < megabytes * 1_000_000:
            for number, piece in enumerate(pieces):
                shard.write(make_document(piece, source="Real", origin=f"text#{number}", licence="public-domain"))
                characters += len(piece)
    return characters


def _until(texts: Iterator[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text
        characters -= len(text)
        if characters < 0:
            return


def cpu_seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def limit(path: Path) -> float:
    import simdjson

    raw = path.read_bytes()

    def decompress() -> None:
        reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw), read_across_frames=True)
        while reader.read(1 << 17):
            pass

    lines = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw), read_across_frames=True).read().splitlines()

    def parse() -> None:
        parser = simdjson.Parser()
        for line in lines:
            parser.parse(line)["text"]

    return cpu_seconds(decompress) + cpu_seconds(parse)


def peers(path: Path) -> dict[str, Callable[[], object]]:
    """Readers of others, where they are installed."""
    found: dict[str, Callable[[], object]] = {}
    try:
        import lm_dataformat

        found["lm_dataformat"] = lambda: [0 for _ in lm_dataformat.Reader(str(path.parent)).stream_data()]
    except ImportError:
        pass
    try:
        import polars

        found["polars"] = lambda: polars.scan_ndjson(path).select("text").collect()
    except ImportError:
        pass
    try:
        from datatrove.pipeline.readers import JsonlReader

        found["datatrove"] = lambda: [0 for _ in JsonlReader(str(path.parent), compression="zstd")()]
    except ImportError:
        pass
    try:
        import datasets

        found["datasets"] = lambda: [
            0 for _ in datasets.load_dataset("json", data_files=str(path), split="train", streaming=True)
        ]
    except ImportError:
        pass
    return found


_PART = """
import sys
from piledriver.corpus import Part, read_texts
print("ready", flush=True)
sys.stdin.readline()
print(sum(len(t) for t in read_texts(sys.argv[1], part=Part(int(sys.argv[2]), int(sys.argv[3])))))
"""


def wall(path: Path, processes: int) -> float:
    """How long so many processes read, from the moment when all of them stand ready."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _PART, str(path), str(i), str(processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(processes)
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    start = time.monotonic()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in running:
        process.communicate()
    return time.monotonic() - start


def speed_up(path: Path) -> float:
    """Of two processes over one: the median of runs in turn."""
    return statistics.median(wall(path, 1) / wall(path, 2) for _ in range(2 * REPEATS + 1))


def opening(path: Path, document: int) -> float:
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        next(read_texts(path, start=document))
        best = min(best, time.perf_counter() - start)
    return best


def opening_of_many(documents: int) -> dict[str, object]:
    """How long the first and the last document of a file of so many take to be there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "00000.jsonl.zst"
        with ShardFileWriter(path) as shard:
            for number in range(documents + 1):
                shard.write_line(b'{"text": "Document %d of many.", "meta": {"pile_set_name": "Many"}}\n' % number)
        last = next(read_texts(path, start=documents))
        return {
            "row": "shards: opening",
            "opening_ms": {f"document {n}": round(1e3 * opening(path, n), 2) for n in (0, documents)},
            "last": last,
            "bytes": path.stat().st_size,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=150)
    parser.add_argument("--documents", type=int)
    arguments = parser.parse_args()
    if arguments.documents:
        print(json.dumps(opening_of_many(arguments.documents)))
        return
    size = arguments.megabytes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "00000.jsonl.zst"
        characters = write_corpus(path, size)
        bound = limit(path)
        ours = {
            "text": cpu_seconds(lambda: [0 for _ in read_texts(path)]),
            "text and meta": cpu_seconds(lambda: [0 for _ in read_shards(path)]),
        }
        beside: dict[str, float | str] = {}
        for name, read in peers(path).items():
            try:
                beside[name] = round(characters / cpu_seconds(read) / 1e6)
            except Exception as error:
                beside[name] = f"failed: {type(error).__name__}"
        big = Path(folder) / "big.jsonl.zst"
        count = write_corpus(big, 4 * size) // 5400
        row = {
            "row": "shards",
            "unit": "million characters per CPU-second",
            "ours": {name: round(characters / seconds / 1e6) for name, seconds in ours.items()},
            "peer": beside,
            "limit": round(characters / bound / 1e6),
            "share_of_limit": {name: round(bound / seconds, 2) for name, seconds in ours.items()},
            "two_processes_against_one": round(speed_up(big), 2),
            "opening_ms": {
                "document 0": round(1e3 * opening(big, 0), 2),
                f"document {count - 2}": round(1e3 * opening(big, count - 2), 2),
            },
            "cores": len(os.sched_getaffinity(0)),
        }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
