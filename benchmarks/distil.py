"""A step of distillation beside its parts: the student's own training step, and the teacher's forward pass.

    python benchmarks/distil.py          # 124M and a student of 70% of its block parameters; CPU or GPU

`speed` is the time of both parts, each alone, over that of the step: 1 if distillation costs nothing else. `memory` is
its peak over that of the student's training plus the teacher's weights: allocated memory on a GPU, resident memory of a
process of its own on a CPU. Steps of the three kinds are taken in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from piledriver.compress.distil.loss import DivergenceSettings, linear_distillation
from piledriver.compress.distil.objective import DistilTargets
from piledriver.compress.distil.teacher import Teacher
from piledriver.data.stream.loader import TokenBatch
from piledriver.models import ModelConfig, Transformer

LARGE = ModelConfig(vocab_size=50304, dim=768, layers=12, heads=12, mlp_dim=2048, max_positions=1024)
SMALL = dataclasses.replace(LARGE, mlp_dim=1120)
MIX = DivergenceSettings(cross_entropy=0.5)


class Parts:
    """Student, teacher and a batch; what is not asked for is not there."""

    def __init__(self, windows: int, length: int, *, with_teacher: bool) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(0)
        gpu = self.device.type == "cuda"
        self.student = Transformer(SMALL).to(self.device)
        self.student.compute_dtype = torch.bfloat16 if gpu else None  # as `Layout(precision="bf16")` does
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-5, fused=True)
        self.cross_entropy = self.student.cross_entropy
        self.teacher: Teacher | None = None
        if with_teacher:
            self.teacher = Teacher(Transformer(LARGE).to(self.device, torch.bfloat16 if gpu else torch.float32))
        tokens = torch.randint(50257, (windows, length), device=self.device)
        ends = torch.arange(windows + 1, dtype=torch.int32, device=self.device) * length
        self.batch = TokenBatch(tokens, tokens.roll(-1, 1), ends, length, 0)

    def train(self) -> None:
        """A step of the student alone."""
        self.student.cross_entropy = self.cross_entropy
        self._step(self.batch.labels)

    @torch.no_grad()
    def teach(self) -> None:
        """A forward pass of the teacher with its logits, in chunks of tokens: those of a batch are never stored."""
        assert self.teacher is not None
        outputs, count = self.teacher.outputs(self.batch, masks_documents=False), self.batch.inputs.numel()
        for begin in range(0, count, 1024):
            outputs.chunk(begin, min(begin + 1024, count), 1.0)

    def distil(self) -> None:
        """A step of distillation."""
        assert self.teacher is not None

        def loss(hidden: Any, weight: Any, targets: Any, **options: Any) -> Any:
            return linear_distillation(hidden, weight, targets.labels, targets.teacher, MIX, **options)

        self.student.cross_entropy = loss
        self._step(DistilTargets(self.batch.labels, self.teacher.outputs(self.batch, masks_documents=False)))

    def _step(self, targets: Any) -> None:
        sums = self.student(self.batch.inputs, targets)
        (sums.total / sums.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def seconds(call: Callable[[], None]) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - began


def peak_of(kind: str, windows: int, length: int) -> int:
    """Return the peak of two steps in bytes, without what libraries take."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    parts = Parts(windows, length, with_teacher=kind == "distil")
    for _ in range(2):
        (parts.distil if kind == "distil" else parts.train)()
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16 if gpu else 2)
    parser.add_argument("--length", type=int, default=1024 if gpu else 256)
    parser.add_argument("--rounds", type=int, default=20 if gpu else 5)
    parser.add_argument("--peak", choices=("train", "distil"), help="print the peak of this kind of step, and exit")
    options = parser.parse_args()
    if options.peak:
        print(peak_of(options.peak, options.windows, options.length))
        return
    given = [sys.executable, __file__, "--windows", str(options.windows), "--length", str(options.length), "--peak"]
    peaks = {kind: int(subprocess.check_output([*given, kind], text=True)) for kind in ("train", "distil")}
    parts = Parts(options.windows, options.length, with_teacher=True)
    assert parts.teacher is not None
    weights = sum(p.numel() * p.element_size() for p in parts.teacher.model.parameters())
    calls = {"train": parts.train, "teach": parts.teach, "distil": parts.distil}
    for call in calls.values():
        seconds(call)
    rounds = [{name: seconds(call) for name, call in calls.items()} for _ in range(options.rounds)]
    alone = statistics.median((row["train"] + row["teach"]) / row["distil"] for row in rounds)
    found: dict[str, Any] = {"row": "distil", "speed": round(alone, 3), "least_speed": 0.8}
    found |= {"memory": round(peaks["distil"] / (peaks["train"] + weights), 3), "most_memory": 1.1}
    found |= {f"{name}_ms": round(1e3 * statistics.median(row[name] for row in rounds), 1) for name in calls}
    print(json.dumps({**found, "tokens": options.windows * options.length, "peaks": peaks, "teacher": weights}))


if __name__ == "__main__":
    main()
