"""What the Accelerator adds to a step of a tiny model on one process: plain loop, ours, Accelerate's if installed.

    python benchmarks/overhead.py

Processor time of this process, so that other programs on the machine do not count; the three loops in turn, many short
rounds each, median over rounds. `share_of_a_20_ms_step` is what the added time is of a step that takes 20 ms.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 256
ROUNDS = 15
Loop = Callable[[], float]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(STEPS * 4, 16), torch.randn(STEPS * 4, 1))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return model, optimizer, DataLoader(data, batch_size=4), scheduler


def plain() -> Loop:
    model, optimizer, loader, scheduler = parts()

    def run() -> float:
        start = time.process_time()
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return (time.process_time() - start) / STEPS

    return run


def accelerated(package: str) -> Loop:
    accelerator = importlib.import_module(package).Accelerator(cpu=True)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts())

    def run() -> float:
        start = time.process_time()
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return (time.process_time() - start) / STEPS

    return run


def main() -> None:
    torch.set_num_threads(1)
    loops = {"plain": plain(), "ours": accelerated("piledriver.accelerator")}
    if importlib.util.find_spec("accelerate") is not None:
        loops["peer"] = accelerated("accelerate")
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, loop in loops.items():
            seconds[name].append(loop())
    median = {name: statistics.median(rounds) * 1e6 for name, rounds in seconds.items()}
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
                "share_of_a_20_ms_step": round(ours / 20_000, 5),
                "command": "python benchmarks/overhead.py",
                "commit": commit.stdout.strip(),
                "torch": torch.__version__,
                "python": sys.version.split()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
