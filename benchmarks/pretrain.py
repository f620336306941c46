"""Pretraining through `piledriver train` on real token files, against what one would use instead, on one GPU.

    python benchmarks/pretrain.py --tokens TOKENS            # a folder that `piledriver tokenize` made

Both shapes; data loading, logging and checks included: the median of the wall times from step to step. Rows:
`accelerate` and `accelerate-inductor` (transformers' Llama, bf16, fused AdamW), `plain` (a hand-written compiled model
in a plain torch loop); ours: `bf16` (bf16 weights, their other half in the optimizer: layout.precision bf16-pure and
optimizer.kind adamw_split_bf16), `fp8` (fp32 weights, AdamW), both compiled block by block; `bf16-whole` and
`fp8-whole` (bf16 weights in both), the model as one graph with norms recomputed in the backward: layout.compile model
and layout.recompute_norms. All loops read a step's loss when the next step was handed to the device. `ours` is bf16,
`peer` the best of the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import in_turn
import model_step

from piledriver.engine import Layout
from piledriver.models import ModelConfig
from piledriver.models.model_size import flops_per_token
from piledriver.models.presets import preset
from piledriver.optim import OptimizerConfig
from piledriver.train import DataConfig, TrainConfig
from piledriver.train.deferred import DeferredScalars
from piledriver.train.loop import Trainer
from piledriver.train.step import PendingStep, StopSaveVote

PEERS = ("accelerate", "accelerate-inductor", "plain")
OURS = ("bf16", "fp8", "bf16-whole", "fp8-whole")
WARM_UP, SETTLE = 6, 4


class TimedRun(Trainer):
    """`piledriver train` that waits for its turn half-way, and ends when it was timed: what follows is saving."""

    began: list[float]

    def _step(self, step: int, vote: StopSaveVote) -> PendingStep:
        half = self.total_steps // 2
        if step == half:
            in_turn.my_turn()
        if step == half + SETTLE:
            self.began = []
        if step > half:
            self.began.append(time.monotonic())
        if step == self.total_steps - 1:
            print(json.dumps(result(self.batching.tokens_per_step, self.began)), flush=True)
            os._exit(0)
        return super()._step(step, vote)


WHOLE: dict[str, Any] = {"compile": "model", "recompute_norms": True}
LAYOUTS = {
    "bf16": Layout(precision="bf16-pure"),
    "fp8": Layout(precision="fp8"),
    "bf16-whole": Layout(precision="bf16-pure", **WHOLE),
    "fp8-whole": Layout(precision="fp8-pure", **WHOLE),
}


def config_of(
    model: str | ModelConfig, tokens: str, row: str, batch: int, length: int, steps: int, lr: float = 3e-4
) -> TrainConfig:
    """A run of ours: windows of real tokens, nothing kept but the metrics."""
    return TrainConfig(
        model=model,
        data=DataConfig(tokens=tokens, packing="joined", seq_len=length),
        batch_tokens=batch * length,
        micro_batch_tokens=batch * length,
        budget_tokens=batch * length * steps,
        out=tempfile.mkdtemp(),
        layout=LAYOUTS.get(row, Layout(precision="auto")),
        optimizer=OptimizerConfig(kind="adamw" if row == "fp8" else "adamw_split_bf16", lr=lr),
        trackers=(),
        plots=False,
    )


def ours(shape: str, tokens: str, row: str, steps: int) -> None:
    batch, length = model_step.SHAPES[shape]

    def go() -> None:
        run = TimedRun(config_of(shape, tokens, row, batch, length, 2 * (steps + SETTLE)))
        run.began = []
        run.run()

    in_turn.with_patience(go)


def result(tokens: int, began: list[float]) -> dict[str, Any]:
    """Of the times at which steps began."""
    torch.cuda.synchronize()
    seconds = statistics.median(b - a for a, b in itertools.pairwise(began))
    return {
        "tokens_per_second": round(tokens / seconds),
        "milliseconds": round(1000 * seconds, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def batches(tokens: str, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Windows of the same files, one after the other."""
    ids = np.concatenate([np.load(path) for path in sorted(Path(tokens).glob("*.tokens.npy"))])
    size = batch * length
    while True:
        for begin in range(0, len(ids) - size - 1, size):
            rows = torch.from_numpy(ids[begin : begin + size + 1].astype(np.int64)).pin_memory()
            rows = rows.to("cuda", non_blocking=True)
            yield rows[:-1].view(batch, length), rows[1:].view(batch, length)


def theirs(shape: str, tokens: str, row: str, steps: int) -> dict[str, Any]:
    config = preset(shape)
    batch, length = model_step.SHAPES[shape]
    data = batches(tokens, batch, length)
    if row == "plain":
        step = model_step.hand_step(config, "cuda", argparse.Namespace(compile="model", mode=None))
    else:
        step = accelerate_step(config, compiled=row == "accelerate-inductor")
    for _ in range(WARM_UP):
        in_turn.with_patience(lambda: float(step(*next(data))))
    in_turn.my_turn()
    began: list[float] = []
    before: DeferredScalars | None = None
    for number in range(SETTLE + steps + 1):
        if number >= SETTLE:
            began.append(time.monotonic())
        # Every loss is read, a step behind, by the means that ours has: `item` would wait for the step under way.
        reading = DeferredScalars(step(*next(data)).double().reshape(1))
        if before is not None:
            before.read()
        before = reading
    return result(batch * length, began)


def accelerate_step(config: ModelConfig, *, compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """A loop as Accelerate's documentation writes it."""
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="inductor" if compiled else "no")
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            intermediate_size=config.mlp_dim,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.max_positions,
            tie_word_embeddings=config.tied,
            use_cache=False,
        )
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    model, optimizer = accelerator.prepare(model.to(accelerator.device), optimizer)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", help="token shards, from `piledriver tokenize`")
    parser.add_argument("--shape", choices=["gpt2-124m", "llama-1.2b"], action="append")
    parser.add_argument("--rows", nargs="+", default=[*PEERS, *OURS], choices=[*PEERS, *OURS])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--one", help="used within")
    options = parser.parse_args()
    if options.tokens is None or not torch.cuda.is_available():
        print(
            json.dumps({"row": "pretrain", "ours": None, "peer": None, "limit": None, "why": "needs CUDA and --tokens"})
        )
        return
    torch.set_float32_matmul_precision("high")
    if options.one:
        shape, row = options.one.split(":")
        steps = max(8, options.steps // (1 if shape == "gpt2-124m" else 2))
        if row in PEERS:
            print(json.dumps(theirs(shape, options.tokens, row, steps)), flush=True)
        else:
            ours(shape, options.tokens, row, steps)
        return
    shapes = options.shape or ["gpt2-124m", "llama-1.2b"]
    names = [f"{shape}:{row}" for shape in shapes for row in options.rows]
    # What needs most memory comes when the others are gone.
    late = [name for name in names if name.endswith(":accelerate") or name == "llama-1.2b:accelerate-inductor"]
    given = ["--tokens", options.tokens, "--steps", str(options.steps)]
    found: dict[str, dict[str, Any]] = {}
    for some in ([name for name in names if name not in late], late):
        for name, numbers in in_turn.measure(__file__, some, given):
            found[name] = numbers
            print(name, numbers, file=sys.stderr, flush=True)
    for shape in shapes:
        rows = {row: found[f"{shape}:{row}"] for row in options.rows}
        rates = {row: numbers.get("tokens_per_second") for row, numbers in rows.items()}
        peer = max((rates[row] or 0 for row in PEERS if row in rates), default=None)
        flops = flops_per_token(preset(shape), model_step.SHAPES[shape][1])
        line = {
            "row": f"pretrain {shape}",
            "unit": "tokens/s",
            "ours": rates.get("bf16"),
            "peer": peer,
            "limit": round(model_step.PEAK_FLOPS / flops),
            "rows": rows,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
