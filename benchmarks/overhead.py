"""What the Accelerator adds to a step of a tiny model on one process: plain loop, ours, Accelerate's if installed.

    python benchmarks/overhead.py

Processor time of this process, so that other programs on the machine do not count; the loops in turn, many short rounds
each, median over rounds. `slower_at_20_ms` is by how much our loop is slower than the plain one with a model so wide
that a step takes about 20 ms: the median of the ratios of neighbouring rounds, and the interval that holds that median
95 times in 100 (by resampling the rounds).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROUNDS, WIDE_ROUNDS = 15, 60
Loop = Callable[[], float]


class Size(NamedTuple):
    width: int
    batch: int
    steps: int


TINY, WIDE = Size(32, 4, 256), Size(1024, 384, 10)


def parts(size: Size) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    hidden = [nn.Linear(size.width, size.width), nn.ReLU()] if size is WIDE else []
    model = nn.Sequential(nn.Linear(16, size.width), nn.ReLU(), *hidden, nn.Linear(size.width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = size.steps * size.batch
    data = TensorDataset(torch.randn(samples, 16), torch.randn(samples, 1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return model, optimizer, DataLoader(data, batch_size=size.batch), scheduler


def plain(size: Size) -> Loop:
    model, optimizer, loader, scheduler = parts(size)

    def run() -> float:
        start = time.process_time()
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return (time.process_time() - start) / size.steps

    return run


def accelerated(package: str, size: Size) -> Loop:
    accelerator = importlib.import_module(package).Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts(size))

    def run() -> float:
        start = time.process_time()
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return (time.process_time() - start) / size.steps

    return run


def median_seconds(loops: dict[str, Loop]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, loop in loops.items():
            seconds[name].append(loop())
    return {name: statistics.median(rounds) for name, rounds in seconds.items()}


def slower(plain_loop: Loop, our_loop: Loop) -> tuple[float, float, tuple[float, float]]:
    """Seconds of a plain step, by what share ours is slower, and the interval of that share."""
    plain_loop(), our_loop()
    pairs = []
    for turn in range(WIDE_ROUNDS):
        # Who goes first changes in every round: whatever drifts then favours neither.
        first = plain_loop() if turn % 2 else our_loop()
        second = our_loop() if turn % 2 else plain_loop()
        pairs.append((first, second) if turn % 2 else (second, first))
    shares = [ours / theirs - 1 for theirs, ours in pairs]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(shares, k=len(shares))) for _ in range(2000))
    return statistics.median(theirs for theirs, _ in pairs), statistics.median(shares), (medians[50], medians[-51])


def main() -> None:
    torch.set_num_threads(1)
    loops = {"plain": plain(TINY), "ours": accelerated("piledriver.accelerator", TINY)}
    if importlib.util.find_spec("accelerate") is not None:
        loops["peer"] = accelerated("accelerate", TINY)
    median = {name: 1e6 * seconds for name, seconds in median_seconds(loops).items()}
    wide_seconds, share, interval = slower(plain(WIDE), accelerated("piledriver.accelerator", WIDE))
    ours = median["ours"] - median["plain"]
    peer = median["peer"] - median["plain"] if "peer" in median else None
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        json.dumps(
            {
                "row": "overhead",
                "unit": "added microseconds of processor time per step",
                "ours": round(ours, 1),
                "peer": None if peer is None else round(peer, 1),
                "limit": None if peer is None else round(peer / 3, 1),
                "ratio": None if peer is None else round(ours / peer, 3),
                "plain_loop_us": round(median["plain"], 1),
                "wide_step_ms": round(1e3 * wide_seconds, 1),
                "slower_at_20_ms": round(share, 4),
                "slower_at_20_ms_interval": [round(end, 4) for end in interval],
                "command": "python benchmarks/overhead.py",
                "commit": commit.stdout.strip(),
                "torch": torch.__version__,
                "python": sys.version.split()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
