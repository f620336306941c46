"""Prediction against measurement on one GPU: calibrate, then measure a grid of layouts x shape x batch x optimizer.

`python benchmarks/plan_gpu.py --grid fresh --out FILE.jsonl` first writes the predictions of all rows, then one JSON
line per row as soon as it is measured: peak allocated and reserved, allocated bytes after each phase, the median step.
Then come the choice (the planner's first layouts for one model and batch, all measured) and the census (layouts that
are predicted to fit just so, or just not). Rows run in a worker process under a time limit, so that a row that hangs or
dies costs only itself. `--compare FILE.jsonl` predicts the rows of a file again, offline and on any machine, and
prints the errors. `--tiny` shrinks every shape, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import queue
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

GIB = 2**30
SMALL = {"vocab_size": 32000, "dim": 1024, "layers": 12, "heads": 16, "mlp_dim": 2816, "max_positions": 2048}
SHAPES: dict[str, Any] = {
    "124m": ("gpt2-124m", 1024),
    "1.2b": ("llama-1.2b", 2048),
    "small": (SMALL, 2048),
    "wide": ({**SMALL, "dim": 2048, "layers": 6, "heads": 16, "kv_heads": 4, "mlp_dim": 7168, "tied": False}, 2048),
    "gpt2": ("gpt2", 1024),
    "qwen": ("qwen3-0.6b", 2048),
    "pythia": ("pythia-410m", 2048),
    "moe": ({**SMALL, "layers": 6, "mlp_dim": 1024, "moe": {"experts": 8, "experts_per_token": 2}}, 1024),
}
LATENT = {"kv_rank": 256, "rope_dim": 32, "value_dim": 64, "q_rank": 512}
SHARED = {"experts": 16, "experts_per_token": 4, "expert_dim": 512, "shared_dim": 1024, "dense_layers": [0]}
# Shapes that nothing in the planner was corrected on when they were first measured.
SHAPES |= {
    "square": ({**SMALL, "vocab_size": 50304, "dim": 1536, "layers": 8, "heads": 12, "mlp_dim": 4096}, 1024),
    "deep": ({**SMALL, "dim": 512, "layers": 24, "heads": 8, "mlp_dim": 1408}, 1024),
    "long": ({**SMALL, "layers": 8, "max_positions": 8192}, 8192),
    "multi-query": (
        {**SMALL, "dim": 2048, "layers": 6, "kv_heads": 1, "mlp": "plain", "mlp_dim": 8192, "activation": "gelu"},
        1024,
    ),
    "vocabulary": ({**SMALL, "vocab_size": 256000, "layers": 8, "heads": 8}, 1024),
    "latent": ({**SMALL, "layers": 10, "head_dim": 96, "latent": LATENT}, 1024),
    "shared": ({**SMALL, "layers": 8, "head_dim": 96, "latent": LATENT, "moe": SHARED}, 1024),
    "experts": ({**SMALL, "layers": 6, "moe": {"experts": 32, "experts_per_token": 4, "expert_dim": 512}}, 1024),
    "post": ({**SMALL, "layers": 10, "norm_placement": "post", "qk_norm": "full", "tied": False}, 1024),
    "window": ({**SMALL, "layers": 8, "sliding_window": 512, "max_positions": 4096}, 4096),
    "2b": ({**SMALL, "dim": 2560, "layers": 22, "heads": 20, "kv_heads": 4, "mlp_dim": 8192, "tied": False}, 2048),
}
BF16, PURE = {"precision": "bf16"}, {"precision": "bf16-pure"}
EAGER, COMPILED = {**BF16, "compile": False}, {**BF16, "compile": "blocks"}
GRID: list[tuple[str, int, dict[str, Any], str, int]] = [
    # What compiles takes seconds; the first rows matter most.
    ("1.2b", 8, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("124m", 32, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("1.2b", 4, {**BF16, "compile": False}, "adamw", 1),
    ("124m", 16, {**BF16, "compile": False}, "adamw", 1),
    ("124m", 16, {**BF16, "compile": False, "activations": "full"}, "adamw", 1),
    ("124m", 16, {**BF16, "compile": False, "activations": "selective"}, "adamw", 1),
    ("124m", 8, {"precision": "fp32", "compile": False}, "adamw", 1),
    ("124m", 16, {**BF16, "compile": False}, "adamw", 2),
    ("small", 16, {**BF16, "compile": False}, "adamw", 1),
    ("small", 16, {**BF16, "compile": False}, "lion", 1),
    ("wide", 8, {**BF16, "compile": False}, "adamw", 1),
    ("gpt2", 16, {**BF16, "compile": False}, "adamw", 1),
    ("qwen", 4, {**BF16, "compile": False}, "adamw", 1),
    ("pythia", 4, {**BF16, "compile": False}, "adamw", 1),
    ("moe", 8, {**BF16, "compile": False}, "adamw", 1),
    ("1.2b", 4, {**PURE, "compile": False}, "adamw", 1),
    ("1.2b", 4, {**BF16, "compile": False, "activations": "full"}, "adamw", 1),
    ("wide", 8, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("124m", 32, {**BF16, "compile": "blocks", "activations": "full"}, "adamw", 1),
    ("small", 16, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("gpt2", 16, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("1.2b", 8, {**PURE, "compile": "blocks"}, "adamw_split_bf16", 1),
    ("124m", 32, {**BF16, "compile": "blocks", "activations": "selective"}, "adamw", 1),
    ("124m", 32, {**PURE, "compile": "blocks"}, "adamw_split_bf16", 1),
    ("qwen", 4, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("pythia", 4, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("124m", 32, {**BF16, "compile": "blocks", "recompute_norms": True}, "adamw", 1),
    ("1.2b", 8, {**BF16, "compile": "blocks", "activations": "full"}, "adamw", 1),
    ("1.2b", 8, {"precision": "fp8", "compile": "blocks"}, "adamw", 1),
    ("moe", 8, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("124m", 32, {**BF16, "compile": "model"}, "adamw", 1),
    ("small", 16, {**BF16, "compile": "blocks"}, "adamw8bit", 1),
    ("wide", 4, {**BF16, "compile": "blocks", "activations": "selective"}, "adamw", 1),
    ("1.2b", 2, {**BF16, "compile": False, "offload": "optimizer"}, "adamw", 1),
]


UNSEEN: list[tuple[str, int, dict[str, Any], str, int]] = [
    *(
        (shape, sequences, EAGER, "adamw", 1)
        for shape, sequences in (
            ("square", 8),
            ("deep", 16),
            ("long", 2),
            ("multi-query", 8),
            ("vocabulary", 8),
            ("latent", 8),
            ("shared", 8),
            ("experts", 8),
            ("post", 8),
            ("window", 4),
            ("2b", 2),
        )
    ),
    ("1.2b", 2, {**EAGER, "offload": "optimizer"}, "adamw", 1),
    ("1.2b", 2, {**EAGER, "offload": "parameters"}, "adamw", 1),
    ("square", 8, {**EAGER, "activations": "selective"}, "adamw8bit", 1),
    ("post", 8, {**EAGER, "activations": "full"}, "muon", 1),
    # The choice: every policy and micro-batch of a batch of 32 sequences, besides those above.
    ("square", 32, EAGER, "adamw", 1),
    ("square", 16, EAGER, "adamw", 2),
    ("square", 8, EAGER, "adamw", 4),
    ("square", 32, {**EAGER, "activations": "selective"}, "adamw", 1),
    ("square", 16, {**EAGER, "activations": "selective"}, "adamw", 2),
    ("square", 32, {**EAGER, "activations": "full"}, "adamw", 1),
    ("square", 16, {**EAGER, "activations": "full"}, "adamw", 2),
    ("square", 16, COMPILED, "adamw", 1),
    ("latent", 16, COMPILED, "adamw", 1),
    ("1.2b", 8, {"precision": "fp8", "compile": "blocks"}, "adamw", 1),
    ("long", 2, COMPILED, "adamw", 1),
    ("experts", 16, COMPILED, "adamw", 1),
    ("shared", 16, COMPILED, "adamw", 1),
    ("2b", 4, {"precision": "fp8", "compile": "blocks"}, "adamw", 1),
    ("window", 8, COMPILED, "adamw", 1),
    ("multi-query", 16, COMPILED, "adamw", 1),
]


# Shapes and settings that no row above has; measured after the predictions were written.
SHAPES |= {
    "grouped": (
        {**SMALL, "vocab_size": 65536, "dim": 1536, "layers": 14, "heads": 24, "kv_heads": 8, "mlp_dim": 5120},
        3072,
    ),
    "plain": (
        {
            **SMALL,
            "dim": 1280,
            "layers": 16,
            "heads": 20,
            "mlp": "plain",
            "mlp_dim": 5120,
            "activation": "gelu",
            "norm": "layer",
            "tied": False,
        },
        1536,
    ),
    "tall": ({**SMALL, "vocab_size": 100352, "dim": 2304, "layers": 10, "heads": 18, "mlp_dim": 6144}, 2048),
    "slim latent": (
        {
            **SMALL,
            "dim": 1280,
            "layers": 8,
            "heads": 10,
            "head_dim": 128,
            "mlp_dim": 3584,
            "latent": {"kv_rank": 320, "rope_dim": 64, "value_dim": 128, "q_rank": None},
        },
        1536,
    ),
    "many experts": (
        {
            **SMALL,
            "dim": 1280,
            "layers": 6,
            "heads": 10,
            "moe": {"experts": 24, "experts_per_token": 3, "expert_dim": 768},
        },
        1536,
    ),
    "pick": ({**SMALL, "vocab_size": 49152, "dim": 1792, "layers": 10, "heads": 14, "mlp_dim": 4864}, 2048),
}
FP8, FP8_PURE = {"precision": "fp8", "compile": "blocks"}, {"precision": "fp8-pure", "compile": "blocks"}
FRESH: list[tuple[str, int, dict[str, Any], str, int]] = [
    ("grouped", 6, EAGER, "muon", 1),
    ("tall", 6, FP8, "adamw", 1),
    ("slim latent", 10, COMPILED, "adamw", 1),
    ("many experts", 10, COMPILED, "adamw", 1),
    ("grouped", 6, COMPILED, "adamw", 1),
    ("tall", 6, FP8_PURE, "adamw_split_bf16", 1),
    ("plain", 12, EAGER, "lion", 1),
    ("tall", 5, EAGER, "adamw", 2),
    ("plain", 12, {**EAGER, "activations": "full"}, "adamw", 1),
    ("grouped", 7, {**COMPILED, "activations": "selective"}, "adamw8bit", 1),
    ("plain", 10, COMPILED, "muon", 1),
    ("many experts", 6, {**EAGER, "activations": "full"}, "adamw", 1),
    ("slim latent", 6, EAGER, "adamw", 1),
    ("tall", 7, {**COMPILED, "activations": "full"}, "adamw", 1),
    ("grouped", 3, {**PURE, "compile": False}, "adamw_split", 1),
    ("plain", 9, {**COMPILED, "recompute_norms": True}, "adamw", 3),
    ("tall", 3, {**EAGER, "offload": "optimizer"}, "adamw", 1),
]
CHOICE = ("pick", 48)
"""The shape and the sequences of a step whose first layouts are all measured."""
CENSUS = (("tall", EAGER, "adamw"), ("grouped", COMPILED, "adamw"))
"""Shapes and layouts whose largest fitting micro-batch is run, and the next that is predicted not to fit."""
_CHOICES = 7
# Seconds for a row that compiles, and for one that does not.
_LIMITS = (40.0, 20.0)


TINY = False


def config_of_row(shape: str) -> tuple[Any, int]:
    from piledriver.core.config import from_mapping
    from piledriver.models.config import ModelConfig
    from piledriver.models.presets import preset

    given, length = SHAPES[shape]
    if TINY:
        small = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 4, "mlp_dim": 128, "vocab_size": 256, "head_dim": 16}
        known = {} if isinstance(given, str) else {k: v for k, v in given.items() if k not in ("latent", "moe")}
        given, length = {**known, **small, "max_positions": 64}, 64
    return (preset(given) if isinstance(given, str) else from_mapping(ModelConfig, given, shape)), length


class Meter:
    """Peaks and times of the device; a CPU has no peaks."""

    def __init__(self) -> None:
        import torch

        self.cuda = torch.cuda if torch.cuda.is_available() else None

    def peaks(self) -> tuple[float, float]:
        """Return the largest bytes allocated and reserved since the last reset, in GiB."""
        if self.cuda is None:
            return 0.0, 0.0
        return self.cuda.max_memory_allocated() / GIB, self.cuda.max_memory_reserved() / GIB

    def now(self) -> float:
        """Return the bytes allocated, in GiB."""
        return 0.0 if self.cuda is None else self.cuda.memory_allocated() / GIB

    def reset(self, *, empty: bool = False) -> None:
        """Forget the peaks, and with `empty` what the allocator keeps."""
        if self.cuda is not None:
            if empty:
                gc.collect()
                self.cuda.empty_cache()
            self.cuda.reset_peak_memory_stats()

    def wait(self) -> None:
        """Wait for the device."""
        if self.cuda is not None:
            self.cuda.synchronize()


def measure(
    shape: str,
    sequences: int,
    layout: dict[str, Any],
    optimizer: str,
    accumulation: int,
    *,
    profile: str | None = None,
    steps: int = 12,
) -> dict[str, Any]:
    """Run steps of one layout as the training loop does; return peaks, phases and the median step.

    `profile` is a file for the kernels of one optimizer step.
    """
    import torch

    from piledriver.accelerator import Accelerator
    from piledriver.engine import Layout
    from piledriver.kernels.cross_entropy import default_chunk_tokens
    from piledriver.models import Transformer
    from piledriver.optim import OptimizerConfig, build_optimizer

    meter = Meter()
    config, length = config_of_row(shape)
    torch._dynamo.reset()
    meter.reset(empty=True)
    fields = dict(layout)
    if meter.cuda is None:
        fields |= {"compile": False, "precision": "bf16"}
        fields.pop("recompute_norms", None)
    accelerator = Accelerator(layout=Layout(**fields), gradient_accumulation_steps=accumulation)
    with torch.device("meta"):
        model = Transformer(config)
    made = build_optimizer(model, OptimizerConfig(kind=optimizer, lr=1e-4))
    model = accelerator.prepare_model(model)
    made = accelerator.prepare_optimizer(made)
    tokens = torch.randint(config.vocab_size, (sequences, length + 1), device=accelerator.device)
    phases: dict[str, float] = {}
    blocks = list(model.blocks.values())

    def step(noting: bool = False, update: bool = True) -> None:
        for _ in range(accumulation):
            with accelerator.accumulate(model):
                if noting:
                    phases["before the forward"] = meter.now()
                sums = model(tokens[:, :-1], targets=tokens[:, 1:])
                if noting:
                    phases["after the forward"], phases["peak of the forward"] = meter.now(), meter.peaks()[0]
                    meter.reset()
                accelerator.backward(sums.total / sums.tokens)
                if noting:
                    phases["after the backward"], phases["peak of the backward"] = meter.now(), meter.peaks()[0]
                    meter.reset()
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                if update:
                    made.step()
                    made.zero_grad(set_to_none=True)

    begun = time.perf_counter()
    step()
    step()
    meter.wait()
    compile_seconds = time.perf_counter() - begun
    meter.reset()
    step(noting=True)
    meter.wait()
    phases["peak of the step"] = meter.peaks()[0]
    meter.reset()
    times = []
    end = time.perf_counter() + 0.8
    while len(times) < 3 or (time.perf_counter() < end and len(times) < steps):
        begun = time.perf_counter()
        step()
        meter.wait()
        times.append(time.perf_counter() - begun)
    allocated, reserved = meter.peaks()
    if profile:
        step(update=False)
        save_profile(made.step, profile, meter)
    return {
        "allocated": allocated,
        "reserved": reserved,
        "seconds": statistics.median(times),
        "compile_seconds": round(compile_seconds, 1),
        "phases": phases,
        "blocks": len(blocks),
        "loss_chunk": default_chunk_tokens(config.vocab_size, accelerator.device.type),
    }


def save_profile(run: Any, path: str, meter: Meter) -> None:
    """Write the kernels and the operators of a call, with their seconds."""
    import torch

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if meter.cuda is not None:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    meter.wait()
    begun = time.perf_counter()
    with torch.profiler.profile(activities=kinds, record_shapes=True) as made:
        run()
        host = time.perf_counter() - begun
        meter.wait()
        whole = time.perf_counter() - begun
    order = "self_cpu_time_total" if meter.cuda is None else "self_cuda_time_total"
    table = made.key_averages(group_by_input_shape=True).table(sort_by=order, row_limit=40, max_name_column_width=60)
    Path(path).write_text(f"host {host:.4f} s, whole {whole:.4f} s\n{table}\n", encoding="utf-8")


def predicted(row: dict[str, Any], rates: dict[str, Any] | None = None) -> Any:
    from dataclasses import replace

    from piledriver.core.config import from_mapping
    from piledriver.engine.layout import Layout
    from piledriver.plan import Workload, parse_hardware, predict
    from piledriver.plan.blocks.setting import Traits
    from piledriver.plan.memory.timeline import step_timelines

    config, length = config_of_row(row["shape"])
    cluster = parse_hardware("1xh200")
    if rates is not None:
        cluster = replace(cluster, device=replace(cluster.device, measured=rates))
    batch = row["sequences"] * row["accumulation"]
    workload = Workload(config=config, length=length, batch=batch, optimizer=row["optimizer"])
    made = predict(workload, from_mapping(Layout, row["layout"], "row"), cluster, sequences=row["sequences"])
    chunk = row.get("loss_chunk")
    if "allocated" in row and chunk is None:
        # Measured when a chunk of the loss had at least 4,096 tokens.
        chunk = 1 << max((1 << 28) // config.vocab_size, 4096).bit_length() - 1
    if chunk is None:
        return made
    # Of old rows the loss also had two buffers for its logits.
    timelines = step_timelines(
        config,
        made.layout,
        length=length,
        sequences=row["sequences"],
        accumulation=made.accumulation,
        optimizer=row["optimizer"],
        compiled=made.compiled,
        traits=Traits(loss_buffers=row.get("loss_buffers", 1), loss_chunk=chunk),
    )
    return replace(made, timelines=tuple(timelines))


def kendall(left: list[float], right: list[float]) -> float:
    """Return Kendall's tau of two lists."""
    signs = [1 if (left[i] - left[j]) * (right[i] - right[j]) > 0 else -1 for i in range(len(left)) for j in range(i)]
    return sum(signs) / max(len(signs), 1)


def choices(rows: list[dict[str, Any]], predictions: list[float]) -> list[float]:
    """Return, for each shape, batch and optimizer with several layouts, how fast the chosen one is beside the best.

    The chosen one is that whose predicted step is shortest; 1.0 means that it is the best of those measured.
    """
    groups: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row, predicted_seconds in zip(rows, predictions, strict=True):
        key = (row["shape"], row["sequences"] * row["accumulation"], row["optimizer"], "offload" in row["layout"])
        groups.setdefault(key, []).append((predicted_seconds, row["seconds"]))
    return [min(took for _, took in many) / min(many)[1] for many in groups.values() if len(many) > 1]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the measured rows of a file, each with the rates that were measured before it."""
    found: list[dict[str, Any]] = []
    rates = None
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line) if line.startswith("{") else {}
        rates = row.get("rates", rates)
        if "allocated" in row:
            found.append({**row, "rates": rates})
    return found


def compare(path: Path) -> None:
    """Predict the rows of a file again and print the errors."""
    memory, reserved, plain, tuned = [], [], [], []
    tuned_seconds: list[float] = []
    seconds: list[float] = []
    for row in read_rows(path):
        made, by_rates = predicted(row), predicted(row, row["rates"])
        memory.append(made.worst.allocated / GIB / row["allocated"] - 1)
        reserved.append(made.worst.reserved / GIB / row["reserved"] - 1)
        plain.append(made.time.total / row["seconds"] - 1)
        tuned.append(by_rates.time.total / row["seconds"] - 1)
        tuned_seconds.append(by_rates.time.total)
        seconds.append(row["seconds"])
        print(
            f"{row['shape']:>7} x{row['sequences']:<3} {row['optimizer']:<16} {json.dumps(row['layout'])[:70]:<70} "
            f"memory {row['allocated']:6.2f} {100 * memory[-1]:+6.1f}% reserved {100 * reserved[-1]:+6.1f}% "
            f"step {1e3 * row['seconds']:7.1f} ms {100 * plain[-1]:+6.1f}% calibrated {100 * tuned[-1]:+6.1f}%"
        )
    named = {"allocated": memory, "reserved": reserved, "step, datasheet": plain, "step, calibrated": tuned}
    for name, errors in named.items():
        sizes = [abs(error) for error in errors]
        print(
            f"{name}: {len(errors)} rows, median {100 * statistics.median(sizes):.1f}%, worst {100 * max(sizes):.1f}%, "
            f"lowest {100 * min(errors):+.1f}%"
        )
    shares = choices(read_rows(path), tuned_seconds)
    print(f"chosen layouts: {len(shares)} groups, slowest {100 * min(shares, default=1.0):.1f}% of the best measured")
    print(f"Kendall tau of the calibrated steps: {kendall(tuned_seconds, seconds):.3f}")


def work() -> None:
    """Measure the rows that come as lines of JSON; answer each with a line."""
    import torch  # noqa: F401

    import piledriver.accelerator
    import piledriver.optim  # noqa: F401

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = calibrated(asked["calibrate"]) if "calibrate" in asked else measure(**asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps({"answer": answer}), flush=True)


def calibrated(seconds: float) -> dict[str, Any]:
    """Return this machine's rates."""
    from piledriver.plan.hardware.calibrate import calibrate

    return calibrate(seconds=seconds, save=False)[1]


class Worker:
    """A process that measures rows; one that does not answer in time is replaced."""

    def __init__(self, options: list[str]) -> None:
        self.options = options
        self._start()

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *self.options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stdout, self.lines), daemon=True).start()
        self.ready = False

    @staticmethod
    def _read(stream: Any, lines: queue.Queue[str]) -> None:
        for line in stream:
            lines.put(line)

    def _line(self, key: str, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while True:
            line = self.lines.get(timeout=max(0.0, end - time.monotonic()))
            found = json.loads(line) if line.startswith('{"') else {}
            if key in found:
                return found[key]

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer of the process, or an error if none comes in time."""
        assert self.process.stdin is not None
        try:
            if not self.ready:
                self.ready = self._line("ready", 60.0)
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            answer: dict[str, Any] = self._line("answer", seconds)
            return answer
        except (queue.Empty, BrokenPipeError):
            self.process.kill()
            self._start()
            return {"error": f"no answer in {seconds:.0f} s"}

    def close(self) -> None:
        """End the process."""
        self.process.kill()


def as_row(shape: str, sequences: int, layout: dict[str, Any], optimizer: str, accumulation: int) -> dict[str, Any]:
    """Return the settings of a row by name."""
    return {
        "shape": shape,
        "sequences": sequences,
        "layout": layout,
        "optimizer": optimizer,
        "accumulation": accumulation,
    }


def said(row: dict[str, Any], rates: dict[str, Any] | None = None) -> dict[str, float]:
    """Return the predicted figures of a row."""
    made = predicted(row, rates)
    return {
        "allocated": round(made.worst.allocated / GIB, 4),
        "reserved": round(made.worst.reserved / GIB, 4),
        "seconds": round(made.time.total, 6),
        "fits": made.fits,
    }


def first_choices(rates: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the rows of the planner's first layouts for `CHOICE`, the chosen one first."""
    from dataclasses import replace

    from piledriver.plan import Workload, parse_hardware
    from piledriver.plan.search.candidates import Wishes
    from piledriver.plan.search.choose import search_layouts

    config, length = config_of_row(CHOICE[0])
    cluster = parse_hardware("1xh200")
    if rates is not None:
        cluster = replace(cluster, device=replace(cluster.device, measured=rates))
    workload = Workload(config=config, length=length, batch=CHOICE[1])
    found = search_layouts(workload, cluster, Wishes(offloads=("none",)))
    rows = []
    for one in found.fitting[:_CHOICES]:
        layout: dict[str, Any] = {**COMPILED, "activations": one.layout.activations}
        if one.layout.recompute_norms:
            layout["recompute_norms"] = True
        rows.append(as_row(CHOICE[0], one.sequences, layout, "adamw", one.accumulation))
    return rows


def edges(rates: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return for each entry of `CENSUS` the largest micro-batch that is predicted to fit, and the next, which is not.

    The next is that which lacks at least 3% of the memory.
    """
    rows = []
    for shape, layout, optimizer in CENSUS:
        fitting, beyond = 1, 1
        while predicted(as_row(shape, fitting + 1, layout, optimizer, 1), rates).fits and fitting < 4096:
            fitting += 1
        beyond = fitting
        while (
            predicted(as_row(shape, beyond, layout, optimizer, 1), rates).missing < 0.03 * 140 * GIB and beyond < 4096
        ):
            beyond += 1
        rows += [as_row(shape, count, layout, optimizer, 1) for count in (fitting, beyond)]
    return rows


def main() -> None:
    global TINY
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=165.0)
    parser.add_argument("--calibrate-seconds", type=float, default=8.0)
    parser.add_argument("--grid", choices=("known", "unseen", "fresh"), default="known")
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    TINY = args.tiny
    if args.compare:
        compare(args.compare)
        return
    if args.worker:
        work()
        return
    begun = time.monotonic()
    worker = Worker(["--tiny"] if args.tiny else [])
    file = args.out.open("a", encoding="utf-8") if args.out else None

    def say(row: dict[str, Any]) -> None:
        text = json.dumps({**row, "at": round(time.monotonic() - begun, 1)})
        print(text, flush=True)
        if file is not None:
            file.write(text + "\n")
            file.flush()

    def run(row: dict[str, Any], label: str, **options: Any) -> None:
        left = args.seconds - (time.monotonic() - begun)
        if left < 3:
            return
        limit = _LIMITS[0] if row["layout"].get("compile") else _LIMITS[1]
        say({**row, "part": label, **worker.ask({**row, **options}, min(limit, left))})

    grid = {"known": GRID, "unseen": UNSEEN, "fresh": FRESH}[args.grid]
    rows = [as_row(*one) for one in grid]
    for row in rows:
        say({**row, "said": said(row)})
    rates = worker.ask({"calibrate": args.calibrate_seconds}, 45.0)
    say({"rates": rates})
    known = rates if "matmul" in rates and not args.tiny else None
    for row in rows:
        say({**row, "said, calibrated": said(row, known)})
    profiled = False
    for row in rows[:12]:
        options = {}
        if row["optimizer"] == "muon" and args.out and not profiled:
            options, profiled = {"profile": str(args.out.with_suffix(".muon.txt"))}, True
        run(row, "blind", **options)
    if args.grid == "fresh":
        for row in first_choices(known):
            say({**row, "said, calibrated": said(row, known)})
            run(row, "choice", steps=8)
        for row in edges(known):
            say({**row, "said, calibrated": said(row, known)})
            run(row, "census", steps=3)
    for row in rows[12:]:
        run(row, "blind")
    worker.close()


if __name__ == "__main__":
    main()
