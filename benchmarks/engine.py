"""A user's own training loop through `Accelerator`, against a plain torch loop with a hand-written compiled model.

    python benchmarks/engine.py                          # one GPU: both shapes, bf16 and fp8
    python benchmarks/engine.py --shape llama-1.2b --sizes   # and the largest model that takes a step

Random tokens, the same optimizer settings, clipping at 1.0; median step by CUDA events. Rows: `hand`, a compiled model
under autocast with torch's fused AdamW; `bf16` and `fp8`, our model with fp32 weights and the same AdamW; `bf16-pure`
and `fp8-pure`, bf16 weights whose other half `SplitMasterAdamW` keeps (exact fp32 updates). One JSON line per
shape.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import in_turn
import model_step

from piledriver import Accelerator
from piledriver.engine import Layout
from piledriver.models import ModelConfig, Transformer
from piledriver.models.model_size import flops_per_token, parameter_count
from piledriver.models.presets import preset
from piledriver.optim import OptimizerConfig, build_optimizer

ROWS = {"bf16": "adamw", "fp8": "adamw", "bf16-pure": "adamw_split_bf16", "fp8-pure": "adamw_split_bf16"}
BILLIONS = {  # (dim, layers) of a Llama-like shape, for the search of the largest
    6: (4096, 30),
    7: (4096, 36),
    9: (4096, 46),
    11: (5120, 36),
    13: (5120, 42),
    15: (5120, 46),
    21: (6144, 46),
    23: (6144, 50),
}


def accelerated_step(config: ModelConfig, layout: Layout, optimizer_kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The loop that a user writes."""
    accelerator = Accelerator(layout=layout)
    # What is to stay on the host is made there.
    with torch.device(accelerator.device if layout.offload == "none" else "cpu"):
        model = Transformer(config)
    optimizer = build_optimizer(model, OptimizerConfig(kind=optimizer_kind, lr=3e-4))  # type: ignore[arg-type]
    model, optimizer = accelerator.prepare(model, optimizer)
    parameters = list(model.parameters())

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        sums = model(tokens, targets)
        loss = sums.total / sums.tokens
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def timed(step: Callable[[Tensor, Tensor], Tensor], data: tuple[Tensor, Tensor], steps: int) -> dict[str, Any]:
    begun = time.monotonic()
    losses = [in_turn.with_patience(lambda: step(*data).item()) for _ in range(4)]
    warm_up = time.monotonic() - begun
    in_turn.my_turn()
    for _ in range(3):
        step(*data)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step(*data)
        mark.record()
    torch.cuda.synchronize()
    milliseconds = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return {
        "tokens_per_second": round(data[0].numel() / milliseconds * 1000),
        "milliseconds": round(milliseconds, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "losses": [round(loss, 3) for loss in losses],
        "warm_up_s": round(warm_up, 1),
    }


def one(name: str, options: argparse.Namespace) -> dict[str, Any]:
    shape, row = name.split(":")
    torch.set_float32_matmul_precision("high")
    if shape == "size":
        return largest(*row.split("/"))
    config = preset(shape)
    data = model_step.batch_of(config, *model_step.SHAPES[shape], "cuda")
    steps = max(8, int(12 * 16384 / data[0].numel()))
    if row == "hand":
        plain = argparse.Namespace(compile="model", mode=None)
        return timed(model_step.hand_step(config, "cuda", plain), data, steps)
    layout = Layout(precision=row)  # type: ignore[arg-type]
    return timed(accelerated_step(config, layout, ROWS[row]), data, steps)


def largest(billions: str, offload: str, precision: str, optimizer: str) -> dict[str, Any]:
    """Whether a model of this size takes two steps of 2,048 tokens, and what they need."""
    dim, layers = BILLIONS[int(billions)]
    config = ModelConfig(
        vocab_size=32000, dim=dim, layers=layers, heads=dim // 128, mlp_dim=dim * 11 // 4, max_positions=2048
    )
    layout = Layout(precision=precision, offload=offload, activations="full", compile=False)  # type: ignore[arg-type]
    in_turn.my_turn()
    step = accelerated_step(config, layout, optimizer)
    data = model_step.batch_of(config, 1, 2048, "cuda")
    losses = [step(*data).item() for _ in range(2)]
    return {
        "parameters": parameter_count(config),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["gpt2-124m", "llama-1.2b"], action="append")
    parser.add_argument("--rows", nargs="+", default=["hand", *ROWS], choices=["hand", *ROWS])
    parser.add_argument("--sizes", nargs="*", help="also: sizes to try, as billions/offload/precision/optimizer")
    parser.add_argument("--one", help="used within")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"row": "engine", "ours": None, "peer": None, "limit": None, "why": "needs CUDA"}))
        return
    if options.one:
        print(json.dumps(one(options.one, options)), flush=True)
        return
    shapes = options.shape or ["gpt2-124m", "llama-1.2b"]
    names = [f"{shape}:{row}" for shape in shapes for row in options.rows]
    found = dict(in_turn.measure(__file__, names, []))
    for shape in shapes:
        rows = {row: found[f"{shape}:{row}"] for row in options.rows}
        flops = flops_per_token(preset(shape), model_step.SHAPES[shape][1])
        best = {row: numbers.get("tokens_per_second") for row, numbers in rows.items()}
        peer = best.get("hand")
        line = {
            "row": f"engine {shape}",
            "unit": "tokens/s",
            "ours": best.get("bf16"),
            "peer": peer,
            "limit": round(model_step.PEAK_FLOPS / flops),
            "ratios": {row: round(rate / peer, 3) for row, rate in best.items() if rate and peer and row != "hand"},
            "rows": rows,
        }
        print(json.dumps(line), flush=True)
    for size in options.sizes or []:
        for _, numbers in in_turn.measure(__file__, [f"size:{size}"], []):
            print(json.dumps({"row": f"largest {size}", **numbers}), flush=True)


if __name__ == "__main__":
    main()
