"""The loss after the same tokens: a plain torch loop in bf16, `piledriver train` in bf16 and in fp8, on real text.

    python benchmarks/pretrain_loss.py --tokens TOKENS       # a folder that `piledriver tokenize` made

Every row takes the same batches in the same order at the same learning rates, 500 steps. `plain` is the hand-written
compiled model under autocast, with torch's AdamW and clipping; ours are the rows of `pretrain.py`. The figures are
means of the training loss over 50 steps, none of whose tokens came before. All rows share the GPU: nothing is timed.
One JSON line per shape: `ours` and `peer` are the last 50 steps of bf16 and of the plain loop, `limit` is 1% above
bf16, for fp8.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import model_step
import pretrain

from piledriver.models import ModelConfig
from piledriver.optim import OptimizerConfig, ScheduledLR
from piledriver.train import DataConfig, TrainConfig
from piledriver.train.budget import default_schedule
from piledriver.train.loop import Run
from piledriver.train.metrics import read_metrics
from piledriver.train.position import Position
from piledriver.train.setup import make_parts
from piledriver.train.step import Taken, Wishes

ROWS = ("plain", *pretrain.OURS)
WINDOW = 50
# Windows in a step and their length: small, so that 500 steps are not an epoch of a little text.
BATCHES = {"gpt2-124m": (16, 1024), "llama-1.2b": (2, 2048), "tiny": (2, 64)}
TINY = ModelConfig(vocab_size=50304, dim=32, layers=1, heads=2, max_positions=64)


class Unsaved(Run):
    """Ends with its last step, its losses printed: what would follow is saving."""

    def _step(self, step: int, wishes: Wishes) -> Taken:
        if step < self.total_steps - 1:
            return super()._step(step, wishes)
        self.reports.flush()
        print(json.dumps([row["loss"] for row in read_metrics(self.config.out)]), flush=True)
        os._exit(0)


def config_of(shape: str, row: str, options: argparse.Namespace) -> TrainConfig:
    batch, length = BATCHES[shape]
    pure = row != "fp8"
    return TrainConfig(
        model=TINY if shape == "tiny" else shape,
        data=DataConfig(tokens=options.tokens, packing="joined", seq_len=length),
        batch_tokens=batch * length,
        micro_batch_tokens=batch * length,
        budget_tokens=batch * length * (options.steps + 1),
        out=tempfile.mkdtemp(),
        layout=None if row == "plain" else pretrain.LAYOUTS[row],
        optimizer=OptimizerConfig(kind="adamw_master_bf16" if pure else "adamw", lr=options.lr),
        trackers=(),
        plots=False,
    )


def plain(config: TrainConfig, steps: int) -> list[float]:
    """A loop by hand over the batches that the others take."""
    parts = make_parts(config)
    position, device = Position(parts), parts.device.type
    model = model_step.HandModel(parts.shape).to(device)
    model.compile()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.optimizer.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = ScheduledLR(optimizer, default_schedule(steps + 1), amount=1)
    losses = []
    for _ in range(steps):
        batch = position.next_batch()
        with torch.autocast(device, torch.bfloat16):
            loss = model(batch.inputs, batch.labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    position.close()
    return [float(loss) for loss in losses]


def start(shape: str, row: str, given: list[str]) -> tuple[subprocess.Popen[str], IO[str]]:
    """A row in a process of its own, and what it says of errors."""
    command = [sys.executable, "-u", __file__, *given, "--one", f"{shape}:{row}"]
    errors = tempfile.TemporaryFile("w+")
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True), errors


def losses_of(process: subprocess.Popen[str], errors: IO[str]) -> list[float] | str:
    """What a row printed, or the last line of what went wrong."""
    out, _ = process.communicate()
    lines = [line for line in out.splitlines() if line.startswith("[")]
    with errors:
        errors.seek(0)
        wrong = (errors.read().strip().splitlines() or ["no output"])[-1]
    return json.loads(lines[-1]) if lines else wrong[:300]


def summary(shape: str, found: dict[str, list[float] | str]) -> dict[str, Any]:
    means = {
        row: {
            str(end): round(statistics.mean(losses[end - WINDOW : end]), 4)
            for end in range(2 * WINDOW, len(losses) + 1, 2 * WINDOW)
        }
        for row, losses in found.items()
        if isinstance(losses, list)
    }
    last = {row: statistics.mean(found[row][-WINDOW:]) for row in means}  # type: ignore[arg-type]
    bf16 = last.get("bf16")
    return {
        "row": f"pretrain_loss {shape}",
        "unit": "nats a token",
        "ours": round(bf16, 4) if bf16 else None,
        "peer": round(last["plain"], 4) if "plain" in last else None,
        "limit": round(1.01 * bf16, 4) if bf16 else None,
        "ratios_to_bf16": {row: round(loss / bf16, 4) for row, loss in last.items()} if bf16 else {},
        "means_by_step": means,
        "failed": {row: losses for row, losses in found.items() if isinstance(losses, str)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", help="token shards, from `piledriver tokenize`")
    parser.add_argument("--shape", choices=sorted(BATCHES), action="append")
    parser.add_argument("--rows", nargs="+", default=["plain", "bf16", "fp8", "fp8-whole"], choices=ROWS)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--one", help="used within")
    options = parser.parse_args()
    shapes = options.shape or ["gpt2-124m", "llama-1.2b"]
    if options.tokens is None or not (torch.cuda.is_available() or shapes == ["tiny"]):
        why = "needs CUDA and --tokens"
        print(json.dumps({"row": "pretrain_loss", "ours": None, "peer": None, "limit": None, "why": why}))
        return
    if options.one:
        torch.set_float32_matmul_precision("high")
        shape, row = options.one.split(":")
        config = config_of(shape, row, options)
        if row == "plain":
            print(json.dumps(plain(config, options.steps)), flush=True)
        else:
            Unsaved(config).go()
        return
    given = ["--tokens", options.tokens, "--steps", str(options.steps), "--lr", str(options.lr)]
    given += [text for shape in shapes for text in ("--shape", shape)]
    begun = {(shape, row): start(shape, row, given) for shape in shapes for row in options.rows}
    for shape in shapes:
        found = {row: losses_of(*begun[shape, row]) for row in options.rows}
        print(json.dumps(summary(shape, found)), flush=True)


if __name__ == "__main__":
    main()
