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
from pathlib import Path
from typing import IO, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import in_turn
import model_step
import pretrain

from piledriver.models import ModelConfig
from piledriver.optim import ScheduledLR
from piledriver.train import TrainConfig
from piledriver.train.budget import default_schedule
from piledriver.train.loop import Trainer
from piledriver.train.position import Position
from piledriver.train.reporting.metrics import read_metrics
from piledriver.train.setup import build_components
from piledriver.train.step import PendingStep, StopSaveVote

ROWS = ("plain", *pretrain.OURS)
WINDOW = 50
# Windows in a step and their length: small, so that 500 steps are not an epoch of a little text.
BATCHES = {"gpt2-124m": (16, 1024), "llama-1.2b": (2, 2048), "tiny": (2, 64)}
TINY = ModelConfig(vocab_size=50304, dim=32, layers=1, heads=2, max_positions=64)


class Unsaved(Trainer):
    """Ends with its last step, its losses printed: what would follow is saving."""

    def _step(self, step: int, vote: StopSaveVote) -> PendingStep:
        if step < self.total_steps - 1:
            return super()._step(step, vote)
        self.reports.flush()
        print(json.dumps([row["loss"] for row in read_metrics(self.config.out)]), flush=True)
        os._exit(0)


def plain(config: TrainConfig, steps: int) -> list[float]:
    """A loop by hand over the batches that the others take."""
    components = build_components(config)
    position, device = Position(components), components.device.type
    model = model_step.HandModel(components.shape).to(device)
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


def losses_of(process: subprocess.Popen[str], errors: IO[str]) -> list[float] | str:
    """What a row printed, or the last line of what went wrong."""
    out, _ = process.communicate()
    wrong = in_turn.last_line(errors)
    lines = [line for line in out.splitlines() if line.startswith("[")]
    return json.loads(lines[-1]) if lines else wrong


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
        model = TINY if shape == "tiny" else shape
        config = pretrain.config_of(model, options.tokens, row, *BATCHES[shape], options.steps + 1, options.lr)
        if row == "plain":
            print(json.dumps(plain(config, options.steps)), flush=True)
        else:
            Unsaved(config).run()
        return
    given = ["--tokens", options.tokens, "--steps", str(options.steps), "--lr", str(options.lr)]
    given += [text for shape in shapes for text in ("--shape", shape)]
    begun = {(shape, row): in_turn.start(__file__, f"{shape}:{row}", given) for shape in shapes for row in options.rows}
    for shape in shapes:
        found = {row: losses_of(*begun[shape, row]) for row in options.rows}
        print(json.dumps(summary(shape, found)), flush=True)


if __name__ == "__main__":
    main()
