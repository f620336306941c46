"""Prediction against measurement on one GPU: calibrate, then measure a grid of layouts x shape x batch x optimizer.

`python benchmarks/plan_gpu.py --out FILE.jsonl` prints one JSON line per row, as soon as it is measured:
peak allocated and reserved, allocated bytes after each phase, and the median step. `--compare FILE.jsonl` predicts the
rows again, offline and on any machine, and prints the errors.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
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


def config_of_row(shape: str) -> tuple[Any, int]:
    from piledriver.core.config import from_mapping
    from piledriver.models.config import ModelConfig
    from piledriver.models.presets import preset

    given, length = SHAPES[shape]
    return (preset(given) if isinstance(given, str) else from_mapping(ModelConfig, given, shape)), length


def measure(shape: str, sequences: int, fields: dict[str, Any], optimizer: str, accumulation: int) -> dict[str, Any]:
    """Run steps of one layout as the training loop does; return peaks, phases and the median step."""
    import torch

    from piledriver.accelerator import Accelerator
    from piledriver.engine import Layout
    from piledriver.models import Transformer
    from piledriver.optim import OptimizerConfig, build_optimizer

    config, length = config_of_row(shape)
    torch.cuda.empty_cache()
    accelerator = Accelerator(layout=Layout(**fields), gradient_accumulation_steps=accumulation)
    with torch.device("meta"):
        model = Transformer(config)
    made = build_optimizer(model, OptimizerConfig(kind=optimizer, lr=1e-4))
    model = accelerator.prepare_model(model)
    made = accelerator.prepare_optimizer(made)
    tokens = torch.randint(config.vocab_size, (sequences, length + 1), device="cuda")
    phases: dict[str, float] = {}
    blocks = list(model.blocks.values())

    def note(name: str) -> None:
        phases[name] = torch.cuda.memory_allocated() / GIB

    def step(noting: bool = False) -> None:
        for _ in range(accumulation):
            with accelerator.accumulate(model):
                if noting:
                    note("before the forward")
                sums = model(tokens[:, :-1], targets=tokens[:, 1:])
                if noting:
                    note("after the forward")
                    phases["peak of the forward"] = torch.cuda.max_memory_allocated() / GIB
                    torch.cuda.reset_peak_memory_stats()
                accelerator.backward(sums.total / sums.tokens)
                if noting:
                    note("after the backward")
                    phases["peak of the backward"] = torch.cuda.max_memory_allocated() / GIB
                    torch.cuda.reset_peak_memory_stats()
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                made.step()
                made.zero_grad(set_to_none=True)

    begun = time.perf_counter()
    step()
    step()
    torch.cuda.synchronize()
    compile_seconds = time.perf_counter() - begun
    torch.cuda.reset_peak_memory_stats()
    step(noting=True)
    torch.cuda.synchronize()
    phases["peak of the step"] = torch.cuda.max_memory_allocated() / GIB
    # Blocks outside the compiler: how much each forward leaves.
    torch.cuda.reset_peak_memory_stats()
    times = []
    end = time.perf_counter() + 0.8
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 12):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        step()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    found = {
        "allocated": torch.cuda.max_memory_allocated() / GIB,
        "reserved": torch.cuda.max_memory_reserved() / GIB,
        "seconds": statistics.median(times),
        "compile_seconds": round(compile_seconds, 1),
        "phases": phases,
        "blocks": len(blocks),
    }
    return found


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
    if row.get("loss_buffers", 1) == 1:
        return made
    # Measured before the chunked loss had one buffer for its logits.
    timelines = step_timelines(
        config,
        made.layout,
        length=length,
        sequences=row["sequences"],
        accumulation=made.accumulation,
        optimizer=row["optimizer"],
        compiled=made.compiled,
        traits=Traits(loss_buffers=row["loss_buffers"]),
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--calibrate-seconds", type=float, default=20.0)
    parser.add_argument("--grid", choices=("known", "unseen"), default="known")
    parser.add_argument("--compare", type=Path)
    args = parser.parse_args()
    if args.compare:
        compare(args.compare)
        return
    begun = time.monotonic()
    file = args.out.open("a", encoding="utf-8") if args.out else None

    def say(row: dict[str, Any]) -> None:
        text = json.dumps(row)
        print(text, flush=True)
        if file is not None:
            file.write(text + "\n")
            file.flush()

    import torch

    from piledriver.plan.hardware.calibrate import calibrate

    say({"rates": calibrate(seconds=args.calibrate_seconds, save=False)[1]})
    for shape, sequences, fields, optimizer, accumulation in UNSEEN if args.grid == "unseen" else GRID:
        if time.monotonic() - begun > args.seconds:
            break
        row = {
            "shape": shape,
            "sequences": sequences,
            "layout": fields,
            "optimizer": optimizer,
            "accumulation": accumulation,
        }
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            say({**row, **measure(shape, sequences, fields, optimizer, accumulation)})
        except Exception as error:
            say({**row, "error": f"{type(error).__name__}: {error}"[:400]})


if __name__ == "__main__":
    main()
