"""Bits per byte of compressed models: a 124M Llama is trained on real text, then quantised, pruned and recovered.

    python benchmarks/compress.py --tokens TOKENS --held-out HELD_OUT.jsonl        # on a GPU, a few minutes
    python benchmarks/compress.py --gptq-cpu                                       # 124M by GPTQ on two cores
    python benchmarks/compress.py --gptq-blocks 6 --tokens TOKENS                  # blocks of 9.6B by GPTQ, on a GPU

TOKENS is a folder that `piledriver tokenize` made of other text than HELD_OUT, which has one {"text", "source"} a line.
Every row is scored on all held-out documents, by source, with 95% intervals; `change` is the relative change against
the dense model with the interval of the paired differences of documents. Calibration: 128 windows of 1,024 training
tokens. Rows are printed as they are measured, the last line has all of them: `loss_ratios` are losses of bits per byte
over that of the method that the issue compares with.

To use a GPU well, processes share it: `--work DIR --parts train,structured` beside `--parts quantise,prune`, `--parts
recover`, `--parts aware,pairs` with the same DIR, which wait until the first one has trained the model. Their rows lie
in DIR; the process that ends last prints the summary of all. `--parts scratch` needs no trained model.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
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
from piledriver.compress.distil import DistilConfig, DistilSettings, distil, reconstruct, start_from_codes
from piledriver.compress.measure import paired_change
from piledriver.compress.structured.importance import calibration_loss
from piledriver.corpus import Document
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
from piledriver.train import DataConfig, TrainConfig, train

SHAPES = {
    "124m": ModelConfig(vocab_size=50304, dim=768, layers=12, heads=12, mlp_dim=2048, max_positions=1024),
    "2.8m": ModelConfig(vocab_size=2048, dim=192, layers=4, heads=6, mlp_dim=768, max_positions=256),
    "tiny": ModelConfig(vocab_size=50304, dim=128, layers=2, heads=4, mlp_dim=256, max_positions=64),
}
# Ways to remove 30% of the block parameters: the one that loses least on the calibration text is taken.
SMALLER = {
    "124m": tuple(compress.SmallerShape(kv_heads=k, mlp_dim=m) for k, m in ((12, 1120), (10, 1280), (9, 1344))),
    "2.8m": (compress.SmallerShape(kv_heads=6, mlp_dim=448),),
    "tiny": tuple(compress.SmallerShape(kv_heads=k, mlp_dim=m) for k, m in ((3, 168), (4, 120))),
}


PARTS = ("train", "quantise", "int4", "prune", "structured", "recover", "aware", "pairs", "cache", "scratch")
UNCORRECTED = "30% structured, not corrected"
FITTED = "30% structured, reconstructed"
STRUCTURED, RECOVERED = "30% structured", "30% structured, recovered on 5% of the tokens"
SCRATCH = "the small shape from scratch on 20% of the tokens"
PAIRS, AWARE = "2:4 sparsegpt", "w4a16-g128 quantisation-aware on 5% of the tokens"
PAIRS_RECOVERED = "2:4 sparsegpt, recovered on 5% of the tokens"


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
    """The model, the text, and the rows so far, which processes share in a folder."""

    def __init__(self, options: argparse.Namespace, work: str) -> None:
        self.options, self.work, self.begun = options, work, time.monotonic()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        self.tokenizer = encode_once(open_tokens(options.tokens).tokenizer())
        rows = [json.loads(line) for line in Path(options.held_out).read_text().splitlines()]
        self.documents = [Document(row["text"], source=row["source"]) for row in rows]
        self.shape = SHAPES[options.shape]
        self.stream = open_stream(
            StreamConfig(tokens=options.tokens, seq_len=self.shape.max_positions, seed=1, packing=options.packing)
        )
        self.dense: list[DocumentScore] | None = None
        self.teacher = os.path.join(work, "base", "model")
        os.makedirs(os.path.join(work, "rows"), exist_ok=True)

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """All rows by name, those of other processes too."""
        files = sorted(Path(self.work, "rows").glob("*.json"), key=lambda file: file.stat().st_mtime)
        found = [json.loads(file.read_text()) for file in files]
        return {row["row"].removeprefix("compress: "): row for row in found}

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
        path = Path(self.work, "rows", f"{len(self.rows):02}-{os.getpid()}.json")
        path.with_suffix(".new").write_text(json.dumps({**row, "nats": [score.nats for score in scores]}))
        path.with_suffix(".new").rename(path)
        print(json.dumps(row), flush=True)

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

    def train_config(
        self, model: Any, out: str, tokens: int, lr: float, batch: int, micro: int | None = None
    ) -> TrainConfig:
        """The settings of every run: bf16 on a GPU, compiled block by block."""
        gpu = self.device == "cuda"
        return TrainConfig(
            model=model,
            data=DataConfig(tokens=self.options.tokens, seq_len=self.shape.max_positions, packing=self.options.packing),
            batch_tokens=batch,
            micro_batch_tokens=(micro or batch) if gpu else None,
            budget_tokens=tokens // batch * batch,
            out=os.path.join(self.work, out),
            # From scratch, much decay for few tokens in several epochs: what is left of the initial noise is small.
            optimizer=OptimizerConfig(
                kind=self.options.optimizer,
                lr=lr,
                weight_decay=self.options.decay if isinstance(model, ModelConfig) else 0.1,
                embedding_weight_decay=0.1,
            ),
            layout=Layout(precision="bf16", compile="blocks") if gpu else Layout(),
            checkpoint_minutes=600,
            trackers=(),
            plots=False,
        )


def train_base(bench: Bench) -> dict[str, Any]:
    """Train the model that all rows start from, and return what is known about it."""
    options = bench.options
    base = bench.train_config(bench.shape, "base", options.train_tokens, options.lr, options.step_tokens)
    began = time.monotonic()
    summary = train(base)
    about = {
        "train_tokens": summary.tokens,
        "train_seconds": round(time.monotonic() - began, 1),
        "train_loss": summary.loss,
        "parameters": parameter_count(bench.shape),
    }
    Path(bench.work, "base.json").write_text(json.dumps(about))
    return about


def wait_for_base(bench: Bench) -> None:
    """Wait until another process has trained the model; the GPU is that process's until then."""
    while not Path(bench.work, "base.json").exists():
        time.sleep(0.2)


def four_bit_rows(bench: Bench, model: Transformer, data: dict[str, Any]) -> None:
    """Round to nearest, AWQ, GPTQ."""
    for method in ("rtn", "awq", "gptq"):
        given = {} if method == "rtn" else data
        bench.attempt(
            f"w4a16-g128 {method}",
            lambda m=method, g=given: compress.quantise(model, "w4a16-g128", method=m, **g),  # type: ignore[misc]
        )


def eight_bit_rows(bench: Bench, model: Transformer, data: dict[str, Any]) -> None:
    """Weights alone, and with dynamic inputs."""
    for scheme in ("w8a16", "w8a16-fp8", "w8a8", "w8a8-fp8"):
        bench.attempt(scheme, lambda s=scheme: compress.quantise(model, s))  # type: ignore[misc]
    bench.attempt("w8a8 smoothquant", lambda: compress.quantise(model, "w8a8", method="smoothquant", **data))


def cache_rows(bench: Bench, folder: str) -> None:
    """The KV cache in 8 bits: the first tokens of every document, in chunks that read the earlier ones from it."""
    length, ids = bench.shape.max_positions - 2, []
    for document in bench.documents:
        ids.append([int(token) for token in bench.tokenizer.encode(document.text)[:length]])
    prompts = [[bench.tokenizer.boundary(None), *one] for one in ids]
    bench.dense = None
    for kind in ("auto", "int8", "fp8"):
        began = time.monotonic()
        settings = EngineConfig(
            kv_dtype=kind,  # type: ignore[arg-type]
            token_budget=256,
            cache_tokens=16 * bench.shape.max_positions,
            max_sequences=16,
            prefix_cache=False,
        )
        model = load_folder(folder, dtype=bench.dtype, device=bench.device)
        engine = Engine(model, bench.tokenizer, settings)
        answers = engine.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
        engine.stop()
        scores = []
        for number, (document, answer, one) in enumerate(zip(bench.documents, answers, ids, strict=True)):
            nats = -math.fsum(entry.logprob for entry in (answer.prompt_logprobs or [])[1:] if entry is not None)
            size = len(bench.tokenizer.decode_bytes(one))
            scores.append(DocumentScore(number, document.source, nats, len(one), size, 1))
        bench.add_row(f"KV cache {kind}, first {length} tokens", scores, made_in=round(time.monotonic() - began, 1))


def pruned_rows(bench: Bench, model: Transformer, data: dict[str, Any]) -> None:
    """Half of the weights; Wanda's and 2:4's losses before and after reconstruction."""
    fit: dict[str, Any] = {**data, "epochs": bench.options.epochs, "batch_tokens": bench.options.fit_tokens}
    bench.attempt("50% magnitude", lambda: compress.prune(model, 0.5, method="magnitude"))
    bench.attempt("50% magnitude, by layer", lambda: compress.prune(model, 0.5, method="magnitude", compare="layer"))
    wanda = bench.attempt("50% wanda", lambda: compress.prune(model, 0.5, method="wanda", **data))
    bench.attempt("50% sparsegpt", lambda: compress.prune(model, 0.5, method="sparsegpt", **data))
    if wanda is not None:
        bench.attempt("50% wanda, reconstructed", lambda: reconstruct(wanda, model, **fit))
    bench.attempt("2:4 magnitude", lambda: compress.prune(model, "2:4", method="magnitude"))
    bench.attempt("2:4 wanda", lambda: compress.prune(model, "2:4", method="wanda", **data))
    pairs = bench.attempt(PAIRS, lambda: compress.prune(model, "2:4", method="sparsegpt", **data))
    if pairs is not None:
        bench.attempt("2:4 sparsegpt, reconstructed", lambda: reconstruct(pairs, model, **fit))
    bench.attempt("4:8 wanda", lambda: compress.prune(model, "4:8", method="wanda", **data))
    bench.attempt("4:8 sparsegpt", lambda: compress.prune(model, "4:8", method="sparsegpt", **data))


class Variant(NamedTuple):
    """How a model is distilled: optimizer, rate, share of the cross-entropy, weight of the hidden states."""

    optimizer: str
    lr: float
    cross_entropy: float
    hidden: float

    @classmethod
    def of(cls, text: str) -> Variant:
        """Return the variant that `optimizer:lr:cross_entropy:hidden` names."""
        kind, *figures = text.split(":")
        return cls(kind, *map(float, figures))


class Recovery:
    """Runs on few tokens that start from a compressed model, with the dense model as their teacher."""

    def __init__(self, bench: Bench, trained_tokens: int) -> None:
        self.bench, options = bench, bench.options
        # The calibration text counts too.
        self.tokens = int(0.05 * trained_tokens) - options.samples * bench.shape.max_positions

    def folder_of(self, model: Transformer, name: str) -> str:
        """Return the folder that a model is saved to; it appears when it is complete."""
        folder = os.path.join(self.bench.work, name)
        save_folder(model, folder + ".new")
        os.rename(folder + ".new", folder)
        return folder

    def distilled(self, start: str, name: str, variant: Variant, **settings: Any) -> Transformer:
        """Return the model of a folder after distillation, rounded if it is quantisation-aware."""
        batch = self.bench.options.recover_step_tokens
        run = self.bench.train_config(start, name, self.tokens, variant.lr, batch)
        run = dataclasses.replace(
            run,
            optimizer=OptimizerConfig(kind=variant.optimizer, lr=variant.lr, weight_decay=0.1),
            keep_zeros=name == "pairs",
            schedule=ScheduleConfig(kind="linear", warmup=8, total=max(self.tokens // batch, 9)),
            # A few hundred steps: compiling would take longer than it saves.
            layout=dataclasses.replace(run.layout, compile=False),
        )
        given = DistilSettings(
            teacher=self.bench.teacher, cross_entropy=variant.cross_entropy, hidden=variant.hidden, **settings
        )
        distil(DistilConfig(train=run, distil=given))
        folder = "quantised" if "quantise" in settings else "model"
        return load_folder(os.path.join(run.out, folder), dtype=self.bench.dtype)


def structured_rows(bench: Bench, model: Transformer, data: dict[str, Any], trained_tokens: int) -> None:
    """Remove 30% of the block parameters, correct, reconstruct; distillation starts from the folder `pruned`."""
    options, recovery = bench.options, Recovery(bench, trained_tokens)
    calibration = compress.Calibration.of(bench.stream, samples=options.samples)

    def smaller() -> Transformer:
        tried = []
        for shape in SMALLER[options.shape][: options.shapes]:
            made = compress.prune(model, shape, **data)
            nats = calibration_loss(made, calibration, options.batch_tokens)
            kept = sum(p.numel() for p in made.blocks.parameters()) / sum(p.numel() for p in model.blocks.parameters())
            row = {"row": "compress: shape", **vars(shape), "block_parameters_kept": round(kept, 4)}
            print(json.dumps({**row, "nats_per_token": round(nats, 5)}), flush=True)
            tried.append((nats, len(tried), made))
        return min(tried)[2]

    pruned = bench.attempt(STRUCTURED, smaller)
    if pruned is None:
        return
    config = pruned.config
    fit: dict[str, Any] = {**data, "epochs": options.epochs, "batch_tokens": options.fit_tokens}
    fitted = reconstruct(pruned, model, lr=options.fit_lr, **fit)
    recovery.folder_of(fitted, "pruned")
    bench.attempt(FITTED, lambda: fitted)
    shape = compress.SmallerShape(kv_heads=config.kv_heads, mlp_dim=config.mlp_dim)
    bench.attempt(UNCORRECTED, lambda: compress.prune(model, shape, correct=False, **data))


def recovered_rows(bench: Bench, model: Transformer, data: dict[str, Any], trained_tokens: int) -> None:
    """Distil the reconstructed model in one or more ways."""
    recovery, start = Recovery(bench, trained_tokens), os.path.join(bench.work, "pruned")
    while not os.path.exists(start):
        time.sleep(0.2)
    for number, given in enumerate(bench.options.recover.split(",")):
        bench.attempt(
            f"{RECOVERED}, {given}",
            lambda n=number, g=given: recovery.distilled(start, f"recovered-{os.getpid()}-{n}", Variant.of(g)),  # type: ignore[misc]
        )


def aware_rows(bench: Bench, model: Transformer, data: dict[str, Any], trained_tokens: int) -> None:
    """Quantisation-aware training of int4 that starts with GPTQ's codes."""
    recovery, variant = Recovery(bench, trained_tokens), Variant.of(bench.options.aware)
    start = start_from_codes(model, compress.quantise(model, "w4a16-g128", method="gptq", **data))
    folder = recovery.folder_of(start, "aware-start")
    bench.attempt(AWARE, lambda: recovery.distilled(folder, "aware", variant, quantise="w4a16-g128"))


def pair_rows(bench: Bench, model: Transformer, data: dict[str, Any], trained_tokens: int) -> None:
    """2:4 sparsity, reconstructed and distilled with its zeros kept."""
    options, recovery = bench.options, Recovery(bench, trained_tokens)
    fit: dict[str, Any] = {**data, "epochs": options.epochs, "batch_tokens": options.fit_tokens}
    pairs = compress.prune(model, "2:4", method="sparsegpt", **data)
    start = recovery.folder_of(reconstruct(pairs, model, in_place=True, **fit), "pairs-start")
    variant = Variant.of(options.recover.split(",")[0])
    bench.attempt(PAIRS_RECOVERED, lambda: recovery.distilled(start, "pairs", variant))


def scratch_rows(bench: Bench, trained_tokens: int) -> None:
    """The small shape from scratch on four times the tokens of recovery."""
    options = bench.options
    shape = SMALLER[options.shape][options.scratch_shape]
    config = shape.config_of(bench.shape, kept_layers=list(range(bench.shape.layers)))

    def train_it() -> Transformer:
        run = bench.train_config(config, "scratch", int(0.2 * trained_tokens), options.lr, options.step_tokens)
        train(dataclasses.replace(run, layout=dataclasses.replace(run.layout, compile=False)))
        return load_folder(os.path.join(run.out, "model"), dtype=bench.dtype)

    bench.attempt(SCRATCH, train_it)


def all_rows(bench: Bench) -> None:
    """Measure the rows of the parts asked for, in the order of their worth: a run cut short has the first ones."""
    options, parts = bench.options, bench.options.parts.split(",")
    if "scratch" in parts:
        scratch_rows(bench, options.train_tokens)
        torch.compiler.reset()
    if parts == ["scratch"]:
        return
    if "train" in parts:
        about = train_base(bench)
        torch.compiler.reset()
    else:
        wait_for_base(bench)
        about = json.loads(Path(bench.work, "base.json").read_text())
    model = load_folder(bench.teacher, dtype=bench.dtype, device=bench.device)
    bench.dense = None
    if "train" in parts:
        bench.score("dense", model, **about)
    else:
        bench.score(f"dense, for {options.parts}", model)
    data: dict[str, Any] = {"data": bench.stream, "samples": options.samples, "batch_tokens": options.batch_tokens}
    if "int4" in parts or "quantise" in parts:
        four_bit_rows(bench, model, data)
    if "quantise" in parts:
        eight_bit_rows(bench, model, data)
    if "cache" in parts:
        cache_rows(bench, bench.teacher)
        return
    if "prune" in parts:
        pruned_rows(bench, model, data)
    for part, rows in (
        ("structured", structured_rows),
        ("recover", recovered_rows),
        ("aware", aware_rows),
        ("pairs", pair_rows),
    ):
        if part in parts:
            rows(bench, model, data, about["train_tokens"])


def summary_of(bench: Bench) -> dict[str, Any]:
    """Return what the issue asks for."""
    rows = bench.rows

    recovered = min(
        (name for name in rows if name.startswith(RECOVERED)), key=lambda name: rows[name]["bits_per_byte"], default=""
    )

    def ratio(name: str, other: str) -> list[float] | None:
        """Return the ratio of two losses with its 95% interval, from the residuals of the documents."""
        if not {"dense", name, other} <= set(rows):
            return None
        dense, one, two = (rows[key]["nats"] for key in ("dense", name, other))
        lost = [(a - d, b - d) for d, a, b in zip(dense, one, two, strict=True)]
        total = math.fsum(b for _, b in lost)
        value = math.fsum(a for a, _ in lost) / total
        squares = math.fsum((a - value * b) ** 2 for a, b in lost)
        error = 1.96 * math.sqrt(squares * len(lost) / (len(lost) - 1)) / abs(total)
        return [round(figure, 4) for figure in (value, value - error, value + error)]

    return {
        "row": "compress",
        "unit": "bits per byte",
        "machine": torch.cuda.get_device_name() if bench.device == "cuda" else "cpu",
        "bits_per_byte": {name: row["bits_per_byte"] for name, row in rows.items()},
        "percent_lost": {name: round(100 * row["change"][0], 4) for name, row in rows.items() if "change" in row},
        "loss_ratios": {
            "int4 gptq over rtn": ratio("w4a16-g128 gptq", "w4a16-g128 rtn"),
            "int4 awq over rtn": ratio("w4a16-g128 awq", "w4a16-g128 rtn"),
            "wanda over magnitude": ratio("50% wanda", "50% magnitude"),
            "sparsegpt over magnitude": ratio("50% sparsegpt", "50% magnitude"),
            "wanda reconstructed over wanda": ratio("50% wanda, reconstructed", "50% wanda"),
            "2:4 reconstructed over 2:4": ratio("2:4 sparsegpt, reconstructed", PAIRS),
            "2:4 recovered over 2:4": ratio(PAIRS_RECOVERED, PAIRS),
            "wanda over magnitude by layer": ratio("50% wanda", "50% magnitude, by layer"),
            "sparsegpt over magnitude by layer": ratio("50% sparsegpt", "50% magnitude, by layer"),
            "structured reconstructed over structured": ratio(FITTED, STRUCTURED),
            "structured recovered over structured": ratio(recovered, STRUCTURED),
            "structured recovered over structured, not corrected": ratio(recovered, UNCORRECTED),
            "structured recovered over from scratch": ratio(recovered, SCRATCH),
            "quantisation-aware over gptq": ratio(AWARE, "w4a16-g128 gptq"),
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
        (folders, "load_folder"),
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
    ends = [times["load_folder"][0][1], *(end for _, end in times["advance"])]
    each = [after - before for before, after in itertools.pairwise(ends)]
    files = seconds["load_folder"] + seconds["save_folder"]
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
    parser.add_argument("--work", help="folder that processes share; default: a temporary one")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--train-tokens", type=int, default=40_000_000)
    parser.add_argument("--optimizer", default="adamw", help="of the training from scratch")
    parser.add_argument("--step-tokens", type=int, default=16384)
    parser.add_argument("--recover-step-tokens", type=int, default=8192)
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--decay", type=float, default=1.0)
    parser.add_argument("--aware", default="adamw:2e-5:0:0", help="as --recover, for quantisation-aware training")
    parser.add_argument("--fit-lr", type=float, default=2e-4, help="rate of reconstruction")
    parser.add_argument("--fit-tokens", type=int, default=8192, help="tokens of a step of reconstruction")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--recover",
        default="muon:5e-4:0.5:0",
        help="optimizer, rate, share of the cross-entropy and weight of hidden states of recovery; several with commas",
    )
    parser.add_argument("--shapes", type=int, default=3, help="smaller shapes to try")
    parser.add_argument("--packing", choices=("packed", "joined"), default="packed", help="how windows are filled")
    parser.add_argument("--scratch-shape", type=int, default=0, help="which of the smaller shapes")
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
        all_rows(bench)
        print(json.dumps(summary_of(bench)), flush=True)


if __name__ == "__main__":
    main()
