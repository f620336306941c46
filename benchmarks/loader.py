"""Data loading: windows per second against bare reads, and what a resume at 90% of an epoch costs, side by side.

`ours` and `peer` are CPU times and rates on this machine; peers that are not installed are left out. The limit of
windows per second is copying the same windows out of a memory map with nothing around it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from piledriver.data import StreamConfig, TokenLoader, TokenStream, open_stream, open_tokens, prepare_data_loader
from piledriver.data.tokens.shard import TokenDocument, write_shard

SEQ_LEN, BATCH = 2048, 256
SHARDS, SHARD_TOKENS, DOCUMENT_TOKENS = 4, 1 << 24, 1300


def write_tokens(folder: Path) -> None:
    """Random tokens in documents of random length, about 64 million of them."""
    random = np.random.default_rng(0)
    for number in range(SHARDS):
        documents, total = [], 0
        while total < SHARD_TOKENS:
            length = int(random.exponential(DOCUMENT_TOKENS)) + 1
            ids = random.integers(1, 32000, length, dtype=np.uint16)
            name = f"{number}-{len(documents)}"
            documents.append(TokenDocument(ids, 4 * length, f"source {len(documents) % 5}", "CC0", name, name))
            total += length + 1
        write_shard(folder, f"{number:05d}-000", documents, 0, "<u2")
    notes = [json.loads(path.read_text()) for path in sorted(folder.glob("*-000.json"))]
    totals = {key: sum(note[key] for note in notes) for key in ("documents", "tokens", "bytes")}
    manifest = {
        "format": "piledriver-tokens",
        "version": 1,
        "dtype": "<u2",
        "vocab_size": 32000,
        "boundary": 0,
        "tokenizer": {"file": "tokenizer.json", "sha256": hashlib.sha256(b"").hexdigest()},
        "shard_tokens": SHARD_TOKENS,
        "unit_bytes": 4 * SHARD_TOKENS,
        "inputs": [],
        **totals,
        "shards": notes,
    }
    (folder / "tokenizer.json").write_bytes(b"")
    (folder / "tokens.json").write_text(json.dumps(manifest))


def windows_per_second(folder: Path, rounds: int = 9) -> dict[str, float]:
    """Packed windows with order and document masks, against the same reads bare, in turns; medians."""
    stream = open_stream(StreamConfig(tokens=str(folder), seq_len=SEQ_LEN), check="sizes")
    count = 16384 // BATCH * BATCH
    sources, windows = stream.mixture.locate(np.arange(count))
    arrays = [shard.tokens for shard in stream.tokens.shards]
    segments = (stream.windows.segments(*one)[0] for one in zip(sources.tolist(), windows.tolist(), strict=True))
    places = [(arrays[shard], first) for shard, first, _ in segments]

    def bare() -> None:
        for array, first in places:
            array[first : first + SEQ_LEN + 1].copy()

    def ours() -> None:
        # A new stream each time: its order is worked out again.
        fresh = TokenStream(stream.config, stream.tokens)
        for start in range(0, count, BATCH):
            fresh.read(start, BATCH)

    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for _ in range(rounds):
        times["bare"].append(_cpu_seconds(bare))
        times["ours"].append(_cpu_seconds(ours))
    rates = {name: count / statistics.median(seconds) for name, seconds in times.items()}
    return {**rates, "ratio": rates["ours"] / rates["bare"]}


def _cpu_seconds(work: Callable[[], object]) -> float:
    gc.collect()
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _seconds(work: Callable[[], object], rounds: int = 3) -> float:
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


class Samples(Dataset):
    """A million small samples."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        return index


class Lines(IterableDataset):
    """A stream of windows that cannot seek."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    def __iter__(self):
        for start in range(0, len(self.tokens) - SEQ_LEN, SEQ_LEN):
            yield torch.from_numpy(self.tokens[start : start + SEQ_LEN].astype(np.int64))


def resume_ours(folder: Path) -> dict[str, float]:
    """Seconds from nothing to the first batch, opening included."""

    def first(part: float) -> None:
        stream = open_stream(StreamConfig(tokens=str(folder), seq_len=SEQ_LEN), check="sizes")
        cursor = stream.advance(stream.start, int(part * stream.epoch_windows))
        next(iter(TokenLoader(stream, batch_size=8, cursor=cursor, prefetch=0)))

    def first_of_map_style(part: float) -> None:
        loader = prepare_data_loader(DataLoader(Samples(), batch_size=8, shuffle=True), use_seedable_sampler=True)
        batches = int(part * len(loader))
        state = {"iteration": 0, "batches": batches, "samples": 8 * batches, "sampler": None, "dataset": None}
        loader.load_state_dict(state)
        next(iter(loader))

    return {
        "stream_at_0": _seconds(lambda: first(0)),
        "stream_at_90": _seconds(lambda: first(0.9)),
        "map_style_at_0": _seconds(lambda: first_of_map_style(0)),
        "map_style_at_90": _seconds(lambda: first_of_map_style(0.9)),
    }


def resume_accelerate(folder: Path) -> dict[str, float]:
    """Accelerate's `skip_first_batches` over the same million samples, and over a stream that cannot seek."""
    from accelerate import Accelerator, skip_first_batches

    accelerator = Accelerator(cpu=True)
    tokens = open_tokens(folder, check="sizes").shards[0].tokens

    def first(loader: DataLoader, part: float, length: int) -> None:
        prepared = accelerator.prepare_data_loader(loader)
        next(iter(skip_first_batches(prepared, int(part * length))))

    lines = (len(tokens) // SEQ_LEN) // 8
    return {
        "map_style_at_0": _seconds(lambda: first(DataLoader(Samples(), batch_size=8, shuffle=True), 0, 125_000)),
        "map_style_at_90": _seconds(lambda: first(DataLoader(Samples(), batch_size=8, shuffle=True), 0.9, 125_000)),
        "stream_at_0": _seconds(lambda: first(DataLoader(Lines(tokens), batch_size=8), 0, lines)),
        "stream_at_90": _seconds(lambda: first(DataLoader(Lines(tokens), batch_size=8), 0.9, lines)),
    }


def resume_datasets(folder: Path) -> dict[str, float]:
    """Hugging Face `datasets`, streaming text: `skip`, and its own state."""
    import datasets

    texts = folder / "text"
    texts.mkdir()
    line = json.dumps({"text": "some words of text " * 250}) + "\n"
    for number in range(4):
        (texts / f"{number}.jsonl").write_text(line * 5000)
    datasets.disable_progress_bars()

    def opened():
        files = [str(path) for path in sorted(texts.glob("*.jsonl"))]
        return datasets.load_dataset("json", data_files=files, split="train", streaming=True)

    half = opened()
    rows = iter(half)
    for _ in range(18000):
        next(rows)
    state = half.state_dict()

    def from_state() -> None:
        dataset = opened()
        dataset.load_state_dict(state)
        next(iter(dataset))

    return {
        "at_0": _seconds(lambda: next(iter(opened()))),
        "skip_at_90": _seconds(lambda: next(iter(opened().skip(18000)))),
        "state_at_90": _seconds(from_state),
    }


def resume_mosaic(folder: Path) -> dict[str, float]:
    """mosaicml-streaming over the same windows."""
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    out = folder / "mds"
    tokens = open_tokens(folder, check="sizes").shards[0].tokens
    with MDSWriter(out=str(out), columns={"tokens": "ndarray:uint16"}, size_limit=1 << 26) as writer:
        for start in range(0, len(tokens) - SEQ_LEN, SEQ_LEN):
            writer.write({"tokens": tokens[start : start + SEQ_LEN]})
    count = len(tokens) // SEQ_LEN

    def first(part: float) -> None:
        clean_stale_shared_memory()
        dataset = StreamingDataset(local=str(out), shuffle=True, batch_size=8, num_canonical_nodes=1)
        dataset.load_state_dict(
            {
                "epoch": 0,
                "sample_in_epoch": int(part * count) // 8 * 8,
                "num_canonical_nodes": 1,
                "shuffle_seed": dataset.shuffle_seed,
                "initial_physical_nodes": 1,
            }
        )
        next(iter(dataset))

    return {"at_0": _seconds(lambda: first(0)), "at_90": _seconds(lambda: first(0.9))}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(folder)
        rates = windows_per_second(folder)
        resume: dict[str, dict[str, float]] = {"ours": resume_ours(folder)}
        for peer, measure in (
            ("accelerate", resume_accelerate),
            ("datasets", resume_datasets),
            ("mosaicml-streaming", resume_mosaic),
        ):
            try:
                resume[peer] = measure(folder)
            except ImportError:
                continue
    row = {
        "row": "loader",
        "ours": round(rates["ours"]),
        "limit": round(rates["bare"]),
        "ratio_to_limit": round(rates["ratio"], 3),
        "unit": f"windows of {SEQ_LEN} tokens per CPU-second, order and document masks included",
        "goal": "ratio_to_limit >= 0.5; resume at 90% costs what it costs at 0",
        "resume_seconds_to_first_batch": {
            who: {key: round(value, 4) for key, value in figures.items()} for who, figures in resume.items()
        },
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
