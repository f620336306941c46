"""Bits per byte of compressed models: a 124M Llama is trained on real text, then quantised, pruned and recovered.

    python benchmarks/compress.py --tokens TOKENS --held-out HELD_OUT.jsonl        # on a GPU, a few minutes
    python benchmarks/compress.py --gptq-cpu                                       # 124M by GPTQ on two cores

TOKENS is a folder that `piledriver tokenize` made of other text than HELD_OUT, which has one {"text", "source"} a line.
Every row is scored on all held-out documents, by source, with 95% intervals; `change` is the relative change against
the dense model with the interval of the paired differences of documents. Calibration: 128 windows of 1,024 training
tokens. Rows are printed as they are measured, the last line has all of them: `loss_ratios` are losses of bits per byte
over that of the method that the issue compares with.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from piledriver import compress
from piledriver.compress.distil import DistilConfig, DistilSettings, distil, reconstruct
from piledriver.compress.measure import paired_change
from piledriver.corpus import Document
from piledriver.data import StreamConfig, open_stream
from piledriver.data.tokens.token_set import open_tokens
from piledriver.engine import Layout
from piledriver.evaluate import DocumentScore, TransformerScorer, bits_per_byte, summarise
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import load_folder, save_folder
from piledriver.models.model_size import parameter_count
from piledriver.optim import OptimizerConfig
from piledriver.train import DataConfig, TrainConfig, train

SHAPES = {
    "124m": ModelConfig(vocab_size=50304, dim=768, layers=12, heads=12, mlp_dim=2048, max_positions=1024),
    "tiny": ModelConfig(vocab_size=50304, dim=128, layers=2, heads=4, mlp_dim=256, max_positions=64),
}
SMALLER = {
    "124m": compress.SmallerShape(kv_heads=9, mlp_dim=1344),
    "tiny": compress.SmallerShape(kv_heads=3, mlp_dim=168),
}


class Bench:
    """The rows so far."""

    def __init__(self, options: argparse.Namespace, work: str) -> None:
        self.options, self.work, self.begun = options, work, time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.tokenizer = open_tokens(options.tokens).tokenizer()
        rows = [json.loads(line) for line in Path(options.held_out).read_text().splitlines()]
        self.documents = [Document(row["text"], source=row["source"]) for row in rows]
        self.shape = SHAPES[options.shape]
        self.stream = open_stream(StreamConfig(tokens=options.tokens, seq_len=self.shape.max_positions, seed=1))
        self.rows: dict[str, dict[str, Any]] = {}
        self.dense: list[DocumentScore] | None = None

    def score(self, name: str, model: Transformer, **about: Any) -> None:
        """Score a model and print its row."""
        scorer = TransformerScorer(model.to(self.device))
        scores = bits_per_byte(scorer, self.tokenizer, self.documents, batch_tokens=self.options.batch_tokens)
        figures = summarise(scores)
        row: dict[str, Any] = {
            "bits_per_byte": round(figures["all"].bits_per_byte, 5),
            "interval": [round(figures["all"].low, 4), round(figures["all"].high, 4)],
            "by_source": {
                source: [round(value, 4) for value in (row.bits_per_byte, row.low, row.high)]
                for source, row in figures.items()
                if source != "all"
            },
            "seconds": round(time.monotonic() - self.begun, 1),
            **about,
        }
        if self.dense is None:
            self.dense = scores
        else:
            row["change"] = [round(value, 6) for value in paired_change(self.dense, scores)]
        self.rows[name] = row
        print(json.dumps({"row": f"compress: {name}", **row}), flush=True)

    def loss(self, name: str) -> float:
        """Bits per byte lost against the dense model."""
        dense = self.rows["dense"]["bits_per_byte"]
        return self.rows[name]["bits_per_byte"] - dense if name in self.rows else math.nan

    def train_config(self, model: Any, out: str, tokens: int, lr: float, batch: int) -> TrainConfig:
        """The settings of every run: bf16 on a GPU, compiled block by block."""
        gpu = self.device == "cuda"
        return TrainConfig(
            model=model,
            data=DataConfig(tokens=self.options.tokens, seq_len=self.shape.max_positions),
            batch_tokens=batch,
            micro_batch_tokens=batch if gpu else None,
            budget_tokens=tokens // batch * batch,
            out=os.path.join(self.work, out),
            optimizer=OptimizerConfig(lr=lr),
            layout=Layout(precision="bf16", compile="blocks") if gpu else Layout(),
            checkpoint_minutes=600,
            trackers=(),
            plots=False,
        )


def rows_of(bench: Bench) -> None:
    """Measure every row, in the order of their worth: a run that is cut short has the first ones."""
    options, batch = bench.options, bench.options.step_tokens
    tokens = options.train_tokens
    base = bench.train_config(bench.shape, "base", tokens, 1e-3, 2 * batch)
    began = time.monotonic()
    summary = train(base)
    seconds = time.monotonic() - began
    about = {"train_tokens": summary.tokens, "train_seconds": round(seconds, 1), "train_loss": summary.loss}
    teacher = os.path.join(base.out, "model")
    model = load_folder(teacher, dtype=bench.dtype, device=bench.device)
    bench.score("dense", model, parameters=parameter_count(bench.shape), **about)
    data: dict[str, Any] = {"data": bench.stream, "samples": options.samples, "batch_tokens": options.batch_tokens}

    def attempt(name: str, make: Callable[[], Transformer]) -> Transformer | None:
        if time.monotonic() - bench.begun > options.limit:
            print(json.dumps({"row": f"compress: {name}", "skipped": "out of time"}), flush=True)
            return None
        try:
            started = time.monotonic()
            made = make()
            bench.score(name, made, made_in=round(time.monotonic() - started, 1))
            return made
        except Exception as error:  # a failed row must not cost the others
            print(json.dumps({"row": f"compress: {name}", "failed": repr(error)[:300]}), flush=True)
            return None

    attempt("w8a16", lambda: compress.quantise(model, "w8a16"))
    attempt("w8a16-fp8", lambda: compress.quantise(model, "w8a16-fp8"))
    for method in ("rtn", "gptq", "awq"):
        given = {} if method == "rtn" else data
        attempt(f"w4a16-g128 {method}", lambda m=method, g=given: compress.quantise(model, "w4a16-g128", method=m, **g))  # type: ignore[misc]
    attempt("50% magnitude", lambda: compress.prune(model, 0.5, method="magnitude"))
    wanda = attempt("50% wanda", lambda: compress.prune(model, 0.5, method="wanda", **data))
    attempt("50% sparsegpt", lambda: compress.prune(model, 0.5, method="sparsegpt", **data))
    if wanda is not None:
        attempt("50% wanda, reconstructed", lambda: reconstruct(wanda, model, epochs=options.epochs, **data))
    pruned = attempt("30% structured", lambda: compress.prune(model, SMALLER[options.shape], **data))
    if pruned is not None:
        parts = sum(p.numel() for p in pruned.blocks.parameters()) / sum(p.numel() for p in model.blocks.parameters())
        print(json.dumps({"row": "compress: sizes", "block_parameters_kept": round(parts, 4)}), flush=True)
        save_folder(pruned, os.path.join(bench.work, "pruned"))
        few = int(0.05 * summary.tokens)

        def recovered() -> Transformer:
            run = bench.train_config(os.path.join(bench.work, "pruned"), "recovered", few, options.recover_lr, batch)
            distil(DistilConfig(train=run, distil=DistilSettings(teacher=teacher)))
            return load_folder(os.path.join(run.out, "model"), dtype=bench.dtype)

        def from_scratch() -> Transformer:
            run = bench.train_config(pruned.config, "scratch", 4 * few, 1e-3, batch)
            train(run)
            return load_folder(os.path.join(run.out, "model"), dtype=bench.dtype)

        attempt("30% structured, recovered on 5% of the tokens", recovered)
        attempt("the small shape from scratch on 20% of the tokens", from_scratch)
    pair = attempt("2:4 sparsegpt", lambda: compress.prune(model, "2:4", method="sparsegpt", **data))
    if pair is not None:
        attempt("2:4 sparsegpt, reconstructed", lambda: reconstruct(pair, model, epochs=options.epochs, **data))
    attempt("w8a8", lambda: compress.quantise(model, "w8a8", method="smoothquant", **data))

    def aware() -> Transformer:
        run = bench.train_config(teacher, "aware", int(0.05 * summary.tokens), 1e-4, batch)
        distil(DistilConfig(train=run, distil=DistilSettings(teacher=teacher, quantise="w4a16-g128")))
        return load_folder(os.path.join(run.out, "quantised"), dtype=bench.dtype)

    attempt("w4a16-g128 quantisation-aware on 5% of the tokens", aware)


def summary_of(bench: Bench) -> dict[str, Any]:
    """Return what the issue asks for."""
    loss = bench.loss

    def ratio(name: str, other: str) -> float | None:
        value = loss(name) / loss(other) if loss(other) else math.nan
        return round(value, 4) if math.isfinite(value) else None

    structured, recovered = "30% structured", "30% structured, recovered on 5% of the tokens"
    return {
        "row": "compress",
        "unit": "bits per byte",
        "machine": torch.cuda.get_device_name() if bench.device == "cuda" else "cpu",
        "bits_per_byte": {name: row["bits_per_byte"] for name, row in bench.rows.items()},
        "percent_lost": {name: round(100 * row["change"][0], 4) for name, row in bench.rows.items() if "change" in row},
        "loss_ratios": {
            "int4 gptq over rtn": ratio("w4a16-g128 gptq", "w4a16-g128 rtn"),
            "int4 awq over rtn": ratio("w4a16-g128 awq", "w4a16-g128 rtn"),
            "wanda over magnitude": ratio("50% wanda", "50% magnitude"),
            "sparsegpt over magnitude": ratio("50% sparsegpt", "50% magnitude"),
            "wanda reconstructed over wanda": ratio("50% wanda, reconstructed", "50% wanda"),
            "2:4 reconstructed over 2:4": ratio("2:4 sparsegpt, reconstructed", "2:4 sparsegpt"),
            "structured recovered over structured": ratio(recovered, structured),
            "quantisation-aware over gptq": ratio(
                "w4a16-g128 quantisation-aware on 5% of the tokens", "w4a16-g128 gptq"
            ),
        },
    }


def gptq_on_cpu(samples: int, length: int) -> None:
    """Print the seconds that GPTQ of a 124M model takes on two cores."""
    torch.set_num_threads(2)
    shape = dataclasses.replace(SHAPES["124m"], max_positions=length)
    model = Transformer(shape)
    tokens = torch.randint(50257, (samples, length), generator=torch.Generator().manual_seed(0))
    began = time.monotonic()
    compress.quantise(model, "w4a16-g128", method="gptq", data=tokens, in_place=True)
    found = {"row": "compress: gptq of 124M on two cores", "samples": samples, "length": length}
    print(json.dumps({**found, "ours": round(time.monotonic() - began, 1), "limit": 180, "unit": "s"}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", help="token shards, from `piledriver tokenize`")
    parser.add_argument("--held-out", help='JSON lines with "text" and "source", of other documents')
    parser.add_argument("--shape", choices=sorted(SHAPES), default="124m")
    parser.add_argument("--train-tokens", type=int, default=30_000_000)
    parser.add_argument("--step-tokens", type=int, default=16384)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--recover-lr", type=float, default=4e-4)
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no row is begun")
    parser.add_argument("--gptq-cpu", action="store_true")
    options = parser.parse_args()
    if options.gptq_cpu:
        gptq_on_cpu(128, 128)
        return
    if options.tokens is None or options.held_out is None:
        print(json.dumps({"row": "compress", "ours": None, "why": "needs --tokens and --held-out"}))
        return
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(options, work)
        rows_of(bench)
        print(json.dumps(summary_of(bench)), flush=True)


if __name__ == "__main__":
    main()
