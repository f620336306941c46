"""Bits per byte of compressed models: a 124M Llama is trained on real text, then pruned, recovered and quantised.

    python benchmarks/compress.py --tokens TOKENS --held-out HELD_OUT.jsonl        # on a GPU, a few minutes
    python benchmarks/compress.py --gptq-cpu                                       # 124M by GPTQ on two cores
    python benchmarks/compress.py --gptq-blocks 6 --tokens TOKENS                  # blocks of 9.6B by GPTQ, on a GPU

TOKENS is a folder that `piledriver tokenize` made of other text than HELD_OUT, which has one {"text", "source"} a line.
Every row is scored on all held-out documents, by source, with 95% intervals; `change` is the relative change against
the dense model with the interval of the paired differences of documents. Calibration: 128 windows of 1,024 training
tokens. Parts are measured in the order in which `--parts` names them, each row and each ratio of losses is printed as
soon as it is known, and the last line has all of them, also when the run is ended by SIGTERM. `--work DIR` keeps the
trained model: a second run with the same DIR starts from it; the first may have `--parts ""`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from piledriver import compress
from piledriver.cli.main import main as run_verb
from piledriver.compress import folders, second_order
from piledriver.compress.calibration import BlockWalk, LayerStatistics
from piledriver.compress.distil import DistilConfig, DistilSettings, distil, start_from_codes
from piledriver.compress.measure import paired_change
from piledriver.data import StreamConfig, open_stream
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.data.tokens.token_set import open_tokens
from piledriver.engine import Layout
from piledriver.evaluate import DocumentScore, TransformerScorer, bits_per_byte, summarise
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import load_folder, save_folder
from piledriver.models.model_size import parameter_count
from piledriver.optim import OptimizerConfig, ScheduleConfig
from piledriver.serve import Engine, EngineConfig, SamplingParams
from piledriver.train import DataConfig, SpikeConfig, TrainConfig, train

SHAPES = {
    "124m": ModelConfig(vocab_size=50304, dim=768, layers=12, heads=12, mlp_dim=2048, max_positions=1024),
    "qwen3-124m": ModelConfig(
        vocab_size=50304, dim=768, layers=12, heads=12, mlp_dim=2048, max_positions=1024, qk_norm="head"
    ),
    "2.8m": ModelConfig(vocab_size=2048, dim=192, layers=4, heads=6, mlp_dim=768, max_positions=256),
    "tiny": ModelConfig(vocab_size=50304, dim=128, layers=2, heads=4, mlp_dim=256, max_positions=64),
}
# 30% of the block parameters go: neurons, as `compress.plan` chooses while half of them stay.
SMALLER = {
    "124m": compress.SmallerShape(mlp_dim=1120),
    "qwen3-124m": compress.SmallerShape(mlp_dim=1120),
    "2.8m": compress.SmallerShape(mlp_dim=448),
    "tiny": compress.SmallerShape(mlp_dim=120),
}
SHARE = 0.05
"""Part of the training tokens that recovery may see, its calibration text included."""

UNCORRECTED, STRUCTURED = "30% structured, not corrected", "30% structured"
FITTED, RECOVERED = "30% structured, reconstructed", "30% structured, recovered on 5% of the tokens"
SCRATCH = "the small shape from scratch on 20% of the tokens"
FURTHER = "dense, trained further on the tokens of recovery"
MAGNITUDE, WANDA, SPARSEGPT = "50% magnitude", "50% wanda", "50% sparsegpt"
RTN, AWQ, GPTQ = "w4a16-g128 rtn", "w4a16-g128 awq", "w4a16-g128 gptq"
AWARE = "w4a16-g128 quantisation-aware on 5% of the tokens"
# Losses of bits per byte, over that of what the issue compares with.
RATIOS = {
    "structured recovered over structured": (RECOVERED, STRUCTURED),
    "structured recovered over structured, not corrected": (RECOVERED, UNCORRECTED),
    "structured recovered over from scratch": (RECOVERED, SCRATCH),
    "structured reconstructed over structured": (FITTED, STRUCTURED),
    "wanda over magnitude": (WANDA, MAGNITUDE),
    "wanda reconstructed over magnitude": (f"{WANDA}, reconstructed", MAGNITUDE),
    "wanda reconstructed over magnitude reconstructed": (f"{WANDA}, reconstructed", f"{MAGNITUDE}, reconstructed"),
    "wanda reconstructed over wanda": (f"{WANDA}, reconstructed", WANDA),
    "wanda over magnitude by layer": (WANDA, f"{MAGNITUDE}, by layer"),
    "sparsegpt over magnitude": (SPARSEGPT, MAGNITUDE),
    "sparsegpt over magnitude by layer": (SPARSEGPT, f"{MAGNITUDE}, by layer"),
    "2:4 reconstructed over 2:4": ("2:4 sparsegpt, reconstructed", "2:4 sparsegpt"),
    "2:4 recovered over 2:4": ("2:4 sparsegpt, recovered on 5% of the tokens", "2:4 sparsegpt"),
    "4:8 recovered over 4:8": ("4:8 sparsegpt, recovered on 5% of the tokens", "4:8 sparsegpt"),
    "int4 gptq over rtn": (GPTQ, RTN),
    "int4 awq over rtn": (AWQ, RTN),
    "quantisation-aware over gptq": (AWARE, GPTQ),
}


class HeldOut(NamedTuple):
    """A document to score. That of `piledriver.corpus` needs msgspec, which an image for GPUs may lack."""

    text: str
    source: str


def encode_once(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with a memory: all rows are scored on the same documents."""
    known: dict[str, Any] = {}

    def encode_batch(texts: Sequence[str]) -> Any:
        [text] = texts
        if text not in known:
            known[text] = tokenizer.encode_batch([text])
        return known[text]

    return dataclasses.replace(tokenizer, encode_batch=encode_batch)


class Bench:
    """The model, the text, and the rows so far."""

    def __init__(self, options: argparse.Namespace, work: str) -> None:
        self.options, self.work, self.begun = options, work, time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.tokenizer = encode_once(open_tokens(options.tokens).tokenizer())
        rows = [json.loads(line) for line in Path(options.held_out).read_text().splitlines()]
        self.documents: list[Any] = [HeldOut(row["text"], row["source"]) for row in rows]
        self.shape = SHAPES[options.shape]
        self.stream = open_stream(
            StreamConfig(tokens=options.tokens, seq_len=self.shape.max_positions, seed=1, packing=options.packing)
        )
        self.dense: list[DocumentScore] | None = None
        self.teacher = os.path.join(work, "base", "model")
        self.data: dict[str, Any] = {
            "data": self.stream,
            "samples": options.samples,
            "batch_tokens": options.batch_tokens,
        }
        self.rows: dict[str, dict[str, Any]] = {}
        self.ratios: dict[str, list[float]] = {}

    def score(self, name: str, model: Transformer, **about: Any) -> None:
        """Score a model and print its row."""
        scorer = TransformerScorer(model.to(self.device))
        scores = bits_per_byte(scorer, self.tokenizer, self.documents, batch_tokens=self.options.batch_tokens)
        self.add_row(name, scores, **about)

    def add_row(self, name: str, scores: list[DocumentScore], **about: Any) -> None:
        """Print the row of some scores; the first ones are those that later ones are compared with."""
        figures = summarise(scores)
        row: dict[str, Any] = {
            "bits_per_byte": round(figures["all"].bits_per_byte, 7),
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
        row = {"row": f"compress: {name}", **row}
        print(json.dumps(row), flush=True)
        self.rows[name] = {**row, "nats": [score.nats for score in scores]}
        for ratio, pair in RATIOS.items():
            if name in pair and set(pair) <= set(self.rows):
                self.ratios[ratio] = self.loss_ratio(*pair)
                print(json.dumps({"row": f"compress: ratio, {ratio}", "ours": self.ratios[ratio]}), flush=True)

    def loss_ratio(self, name: str, other: str) -> list[float]:
        """Return the ratio of two losses with its 95% interval, from the residuals of the documents."""
        dense, one, two = (self.rows[key]["nats"] for key in ("dense", name, other))
        lost = [(a - d, b - d) for d, a, b in zip(dense, one, two, strict=True)]
        total = math.fsum(b for _, b in lost)
        value = math.fsum(a for a, _ in lost) / total
        squares = math.fsum((a - value * b) ** 2 for a, b in lost)
        error = 1.96 * math.sqrt(squares * len(lost) / (len(lost) - 1)) / abs(total)
        return [round(figure, 4) for figure in (value, value - error, value + error)]

    def attempt(self, name: str, make: Callable[[], Transformer]) -> Transformer | None:
        """Make a model and score it, unless time is up; a failed row does not cost the others."""
        if time.monotonic() - self.begun > self.options.limit:
            print(json.dumps({"row": f"compress: {name}", "skipped": "out of time"}), flush=True)
            return None
        try:
            started = time.monotonic()
            made = make()
            self.score(name, made, made_in=round(time.monotonic() - started, 1))
            return made
        except Exception as error:
            traceback.print_exc()
            print(json.dumps({"row": f"compress: {name}", "failed": repr(error)[:300]}), flush=True)
            return None

    @property
    def recovery_tokens(self) -> int:
        """Tokens that recovery may see."""
        return int(SHARE * self.rows["dense"]["train_tokens"])

    @property
    def few_steps(self) -> dict[str, Any]:
        """Settings of runs of a few hundred steps: compiling would take longer than it saves."""
        gpu = self.device == "cuda"
        return {"layout": Layout(precision="bf16", compile=False) if gpu else Layout(), "checkpoint_minutes": 600}

    def train_config(self, model: Any, out: str, tokens: int, lr: float, batch: int, **changes: Any) -> TrainConfig:
        """The settings of training from scratch: bf16 on a GPU, compiled block by block."""
        gpu, steps = self.device == "cuda", tokens // batch
        stable = ScheduleConfig(kind="wsd", warmup=steps // 50, total=steps, decay=steps // 6, floor=0.1)
        given: dict[str, Any] = {
            "layout": Layout(precision="bf16", compile="blocks") if gpu else Layout(),
            # Much decay for few tokens in several epochs: what is left of the initial noise is small.
            "optimizer": OptimizerConfig(lr=lr, weight_decay=self.options.decay, embedding_weight_decay=0.1),
            "schedule": stable if self.options.schedule == "wsd" else None,
            "spikes": SpikeConfig(action=self.options.spikes),
            "checkpoint_minutes": 600,
            **changes,
        }
        return TrainConfig(
            model=model,
            data=DataConfig(tokens=self.options.tokens, seq_len=self.shape.max_positions, packing=self.options.packing),
            batch_tokens=batch,
            micro_batch_tokens=batch if gpu else None,
            budget_tokens=steps * batch,
            out=os.path.join(self.work, out),
            trackers=(),
            plots=False,
            **given,
        )

    def recovered(self, model: Transformer | str, name: str, **given: Any) -> Transformer:
        """Return a compressed model after `compress.recover` in a folder of its own; without tokens, reconstructed."""
        folder = os.path.join(self.work, name)
        return compress.recover(model, self.teacher, self.stream, out=folder, samples=self.options.samples, **given)


def train_base(bench: Bench) -> dict[str, Any]:
    """Train the model that all rows start from, unless it is there, and return what is known about it."""
    options, known = bench.options, Path(bench.work, "base.json")
    if known.exists():
        found: dict[str, Any] = json.loads(known.read_text())
        return found
    base = bench.train_config(bench.shape, "base", options.train_tokens, options.lr, options.step_tokens)
    began = time.monotonic()
    summary = train(base)
    if not summary.finished:
        sys.exit(143)  # stopped by a signal: a run with the same --work resumes
    about = {
        "train_tokens": summary.tokens,
        "train_seconds": round(time.monotonic() - began, 1),
        "train_loss": summary.loss,
        "parameters": parameter_count(bench.shape),
    }
    known.write_text(json.dumps(about))
    return about


def recovery_rows(bench: Bench, model: Transformer) -> None:
    """Remove 30% of the block parameters and recover."""
    shape, tokens = SMALLER[bench.options.shape], bench.recovery_tokens
    pruned = bench.attempt(STRUCTURED, lambda: compress.prune(model, shape, **bench.data))
    if pruned is not None:
        bench.attempt(FITTED, lambda: bench.recovered(pruned, "recovered"))
        bench.attempt(RECOVERED, lambda: bench.recovered(pruned, "recovered", tokens=tokens, **bench.few_steps))
    bench.attempt(UNCORRECTED, lambda: compress.prune(model, shape, correct=False, **bench.data))


def scratch_rows(bench: Bench, _: Transformer) -> None:
    """The shape that recovery has, from scratch on four times its tokens."""

    def from_scratch() -> Transformer:
        options = bench.options
        config = SMALLER[options.shape].config_of(bench.shape, kept_layers=range(bench.shape.layers))
        run = bench.train_config(config, "scratch", 4 * bench.recovery_tokens, options.lr, options.step_tokens)
        train(run)
        return load_folder(os.path.join(run.out, "model"), dtype=bench.dtype)

    bench.attempt(SCRATCH, from_scratch)


def rate_rows(bench: Bench, model: Transformer) -> None:
    """Recovery at other rates of distillation."""
    fitted = os.path.join(bench.work, "recovered", "reconstructed")
    for rate in bench.options.rates:
        given = {"tokens": bench.recovery_tokens, "lr": rate, "epochs": 0, **bench.few_steps}
        bench.attempt(f"{RECOVERED}, lr {rate:g}", functools.partial(bench.recovered, fitted, f"lr-{rate:g}", **given))


def further_rows(bench: Bench, model: Transformer) -> None:
    """The dense model on the tokens of recovery, with its settings: what more training alone is worth."""
    given = {"tokens": bench.recovery_tokens, "epochs": 0, **bench.few_steps}
    bench.attempt(FURTHER, lambda: bench.recovered(bench.teacher, "further", **given))


def wanda_rows(bench: Bench, model: Transformer) -> None:
    """Half of the weights by Wanda and by magnitude, before and after reconstruction."""
    magnitude = bench.attempt(MAGNITUDE, lambda: compress.prune(model, 0.5, method="magnitude"))
    wanda = bench.attempt(WANDA, lambda: compress.prune(model, 0.5, method="wanda", **bench.data))
    if wanda is not None:
        bench.attempt(f"{WANDA}, reconstructed", lambda: bench.recovered(wanda, "wanda"))
    if magnitude is not None:
        bench.attempt(f"{MAGNITUDE}, reconstructed", lambda: bench.recovered(magnitude, "magnitude"))


def sparse_rows(bench: Bench, model: Transformer) -> None:
    """Other ways to choose weights."""
    bench.attempt(SPARSEGPT, lambda: compress.prune(model, 0.5, method="sparsegpt", **bench.data))
    bench.attempt(f"{MAGNITUDE}, by layer", lambda: compress.prune(model, 0.5, method="magnitude", compare="layer"))
    for pattern in ("2:4", "4:8"):
        wanda = functools.partial(compress.prune, model, pattern, method="wanda", **bench.data)
        bench.attempt(f"{pattern} wanda", wanda)
        bench.attempt(f"{pattern} magnitude", functools.partial(compress.prune, model, pattern, method="magnitude"))


def pattern_rows(bench: Bench, model: Transformer, pattern: str) -> None:
    """2:4 or 4:8 sparsity, reconstructed and distilled with its zeros kept."""
    name, folder = f"{pattern} sparsegpt", f"pattern-{pattern[0]}"
    pruned = bench.attempt(name, lambda: compress.prune(model, pattern, method="sparsegpt", **bench.data))
    if pruned is not None:
        given = {"tokens": bench.recovery_tokens, **bench.few_steps}
        bench.attempt(f"{name}, reconstructed", lambda: bench.recovered(pruned, folder))
        bench.attempt(f"{name}, recovered on 5% of the tokens", lambda: bench.recovered(pruned, folder, **given))


def aware_rows(bench: Bench, model: Transformer) -> None:
    """int4 by rounding and by GPTQ, and quantisation-aware training that starts with GPTQ's codes."""
    bench.attempt(RTN, lambda: compress.quantise(model, "w4a16-g128"))
    small = bench.attempt(GPTQ, lambda: compress.quantise(model, "w4a16-g128", method="gptq", **bench.data))
    if small is None:
        return
    start, tokens, batch = os.path.join(bench.work, "codes"), bench.recovery_tokens, bench.options.aware_step_tokens
    save_folder(start_from_codes(model, small), start)
    steps = tokens // batch
    run = bench.train_config(
        start,
        "aware",
        tokens,
        0.0,
        batch,
        **bench.few_steps,
        optimizer=OptimizerConfig(lr=bench.options.aware_lr),
        schedule=ScheduleConfig(kind="linear", warmup=steps // 20, total=max(1, steps)),
    )

    def trained() -> Transformer:
        distil(DistilConfig(train=run, distil=DistilSettings(teacher=bench.teacher, quantise="w4a16-g128")))
        return load_folder(os.path.join(run.out, "quantised"), dtype=bench.dtype)

    bench.attempt(AWARE, trained)


def quantise_rows(bench: Bench, model: Transformer) -> None:
    """AWQ; 8-bit weights alone, and with dynamic inputs."""
    bench.attempt(AWQ, lambda: compress.quantise(model, "w4a16-g128", method="awq", **bench.data))
    for scheme in ("w8a16", "w8a16-fp8", "w8a8", "w8a8-fp8"):
        bench.attempt(scheme, lambda s=scheme: compress.quantise(model, s))  # type: ignore[misc]
    bench.attempt("w8a8 smoothquant", lambda: compress.quantise(model, "w8a8", method="smoothquant", **bench.data))


def vocabulary_rows(bench: Bench, model: Transformer) -> None:
    """The tied embedding and output projection in 8 bits: alone, and beside int4 blocks."""
    for kind in ("int8", "fp8"):
        bench.attempt(f"head {kind}", lambda k=kind: compress.quantise(model, "w8a16", skip=["*"], head=k))  # type: ignore[misc]
    gptq = functools.partial(compress.quantise, model, "w4a16-g128", method="gptq", **bench.data)
    bench.attempt(GPTQ, gptq)
    bench.attempt(f"{GPTQ}, head int8", lambda: gptq(head="int8"))


def cache_rows(bench: Bench, _: Transformer) -> None:
    """The KV cache in 8 bits: the first tokens of every document, in chunks that read the earlier ones from it."""
    length, ids = bench.shape.max_positions - 2, []
    for document in bench.documents:
        ids.append([int(token) for token in bench.tokenizer.encode(document.text)[:length]])
    prompts = [[bench.tokenizer.boundary(None), *one] for one in ids]
    dense, bench.dense = bench.dense, None
    for kind in ("auto", "int8", "fp8"):
        began = time.monotonic()
        settings = EngineConfig(
            kv_dtype=kind,  # type: ignore[arg-type]
            token_budget=256,
            cache_tokens=16 * bench.shape.max_positions,
            max_sequences=16,
            prefix_cache=False,
        )
        model = load_folder(bench.teacher, dtype=bench.dtype, device=bench.device)
        engine = Engine(model, bench.tokenizer, settings)
        answers = engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        engine.stop()
        scores = []
        for number, (document, answer, one) in enumerate(zip(bench.documents, answers, ids, strict=True)):
            nats = -math.fsum(entry.logprob for entry in (answer.prompt_logprobs or [])[1:] if entry is not None)
            size = len(bench.tokenizer.decode_bytes(one))
            scores.append(DocumentScore(number, document.source, nats, len(one), size, 1))
        bench.add_row(f"KV cache {kind}, first {length} tokens", scores, made_in=round(time.monotonic() - began, 1))
    bench.dense = dense


PARTS: dict[str, Callable[[Bench, Transformer], None]] = {
    "recovery": recovery_rows,
    "scratch": scratch_rows,
    "wanda": wanda_rows,
    "2:4": functools.partial(pattern_rows, pattern="2:4"),
    "aware": aware_rows,
    "further": further_rows,
    "rates": rate_rows,
    "4:8": functools.partial(pattern_rows, pattern="4:8"),
    "sparse": sparse_rows,
    "quantise": quantise_rows,
    "vocabulary": vocabulary_rows,
    "cache": cache_rows,
}


def all_rows(bench: Bench) -> None:
    """Train the model and measure the parts asked for, in their order: a run cut short has the first ones."""
    about = train_base(bench)
    model = load_folder(bench.teacher, dtype=bench.dtype, device=bench.device)
    bench.score("dense", model, **about)
    for part in filter(None, bench.options.parts.split(",")):
        PARTS[part](bench, model)


def summary_of(bench: Bench) -> dict[str, Any]:
    """Return the figures of all rows, and the ratios of their losses."""
    rows = bench.rows
    return {
        "row": "compress",
        "unit": "bits per byte",
        "machine": torch.cuda.get_device_name() if bench.device == "cuda" else "cpu",
        "bits_per_byte": {name: row["bits_per_byte"] for name, row in rows.items()},
        "percent_lost": {name: round(100 * row["change"][0], 4) for name, row in rows.items() if "change" in row},
        "loss_ratios": bench.ratios,
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


@contextmanager
def timed(places: Sequence[tuple[Any, str]]) -> Iterator[dict[str, list[tuple[float, float]]]]:
    """Keep when functions begin and end, with the GPU's work for them, while the block runs."""
    times: dict[str, list[tuple[float, float]]] = {}
    before = [getattr(owner, name) for owner, name in places]

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = now()
            found = function(*arguments, **options)
            times.setdefault(name, []).append((began, now()))
            return found

        return call

    for (owner, name), function in zip(places, before, strict=True):
        setattr(owner, name, wrap(name, function))
    try:
        yield times
    finally:
        for (owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)


def now() -> float:
    """Return the time once the GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


def gptq_of_some_blocks(layers: int, tokens: str, *, tiny: bool = False) -> None:
    """Quantise the first blocks of a 9.6B model with `piledriver compress quantise`, and print what all would take.

    The folder holds random weights; the calibration text is 128 windows of 2,048 tokens. The verb reads the folder, has
    one block at a time on the device, and writes the result.
    """
    blocks, samples, length = 43, 2 if tiny else 128, 64 if tiny else 2048
    shape = ModelConfig(
        vocab_size=50304, dim=4096, layers=layers, heads=32, kv_heads=8, mlp_dim=14336, max_positions=length
    )
    if tiny:
        shape = dataclasses.replace(shape, dim=128, heads=4, kv_heads=2, mlp_dim=256)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = Transformer(shape)
    model = model.to(torch.float32 if tiny else torch.bfloat16).to_empty(device=device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            torch.nn.init.ones_(parameter)
    quantise_module = sys.modules["piledriver.compress.quantise"]  # the package's name is that of the function
    places = [
        (folders, "open_for_blocks"),
        (folders, "save_folder"),
        (BlockWalk, "statistics"),
        (BlockWalk, "advance"),
        (LayerStatistics, "add"),
        (quantise_module, "gptq"),
        (second_order, "inverse_factor"),
        (quantise_module, "_relative_error"),
    ]
    with tempfile.TemporaryDirectory() as work:
        save_folder(model, os.path.join(work, "large"))
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        keys = {
            "model": os.path.join(work, "large"),
            "out": os.path.join(work, "small"),
            "data.tokens": tokens,
            "data.seq_len": length,
            "samples": samples,
            "batch_tokens": 16384,
        }
        began = now()
        with timed(places) as times:
            run_verb(["compress", "quantise", *(f"{key}={value}" for key, value in keys.items())])
        total = now() - began
    seconds = {name: sum(end - begin for begin, end in spans) for name, spans in times.items()}
    # A block begins when the one before it has advanced; the first one also loads libraries and compiles kernels.
    ends = [times["open_for_blocks"][0][1], *(end for _, end in times["advance"])]
    each = [after - before for before, after in itertools.pairwise(ends)]
    files = seconds["open_for_blocks"] + seconds["save_folder"]
    found = {"row": "compress: gptq of 9.6B by the verb", "blocks_run": layers, "blocks": blocks, "samples": samples}
    found |= {"length": length, "parameters": parameter_count(dataclasses.replace(shape, layers=blocks))}
    found |= {"total": round(total, 2), "each_block": [round(value, 2) for value in each], "ours": round(each[-1], 3)}
    found |= {"unit": "s a block", "where": {name: round(value, 2) for name, value in seconds.items()}}
    # Reading and writing grow with the blocks; the embedding, which is counted with them, does not.
    found |= {"all_blocks": round(each[0] + each[-1] * (blocks - 1) + files * blocks / layers, 1), "limit": 900}
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    print(json.dumps({**found, "peak_gib": peak}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", help="token shards, from `piledriver tokenize`")
    parser.add_argument("--held-out", help='JSON lines with "text" and "source", of other documents')
    parser.add_argument("--shape", choices=sorted(SHAPES), default="124m")
    parser.add_argument("--work", help="folder of all models; default: a temporary one")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, in this order")
    parser.add_argument("--train-tokens", type=int, default=40_000_000)
    parser.add_argument("--step-tokens", type=int, default=16384)
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--decay", type=float, default=1.0)
    parser.add_argument("--schedule", choices=("cosine", "wsd"), default="cosine", help="learning rate from scratch")
    parser.add_argument("--spikes", choices=("skip", "rollback"), default="skip", help="what to do about loss spikes")
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="other rates of distillation, for rates")
    parser.add_argument("--aware-lr", type=float, help="rate of quantisation-aware training; default: that of `distil`")
    parser.add_argument("--aware-step-tokens", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--packing", choices=("packed", "joined"), default="packed", help="how windows are filled")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no row is begun")
    parser.add_argument("--gptq-cpu", action="store_true")
    parser.add_argument("--gptq-blocks", type=int, help="quantise this many blocks of 9.6B with the verb")
    options = parser.parse_args()
    if options.gptq_cpu:
        gptq_on_cpu(128, 128)
        return
    if options.gptq_blocks:
        gptq_of_some_blocks(options.gptq_blocks, options.tokens, tiny=not torch.cuda.is_available())
        return
    if options.tokens is None or options.held_out is None:
        print(json.dumps({"row": "compress", "ours": None, "why": "needs --tokens and --held-out"}))
        return
    torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, options.work or folder)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            all_rows(bench)
        finally:
            print(json.dumps(summary_of(bench)), flush=True)


if __name__ == "__main__":
    main()
