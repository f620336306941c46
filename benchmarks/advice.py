"""Twelve slow training loops: is the first advice of the profile right, and does following it give what it predicts?

Each loop is profiled as `piledriver profile` does it; then the slow loop and its cure are timed without the profiler.
Loops that need a GPU are skipped without one; `--device cuda` runs those that can on the GPU instead of the CPU.

    python benchmarks/advice.py [--only NAME] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as processes

sys.path.insert(0, str(Path(__file__).parent))

from slow_scripts.loops import LOOPS

from piledriver.accelerator.profiling import LoopProfiler
from piledriver.observe.report.report import Report

_ON_BOTH = ("tiny kernels", "micro-batch", "padding", "slow loader")


def measure(name: str, device: str, seconds: float = 1.0) -> dict[str, Any]:
    return judge(name, device, profile_loop(name, device), *gain(name, device, seconds))


def profile_loop(name: str, device: str, folder: str | None = None) -> Report:
    """Profile the slow loop as `piledriver profile` does; a folder keeps the report and the traces."""
    with LoopProfiler(steps=4, warm_up=9, folder=folder, title=name) as profiler:
        for _ in LOOPS[name][0](True, device):
            pass
    assert profiler.report is not None
    return profiler.report


def gain(name: str, device: str, seconds: float = 1.0) -> tuple[float, float]:
    """Return the seconds of a step of the slow loop and of its cure."""
    loop = LOOPS[name][0]
    return timed(loop(True, device), device, seconds), timed(loop(False, device), device, seconds)


def judge(name: str, device: str, report: Report, slow: float, fixed: float) -> dict[str, Any]:
    """Compare the first advice of a report with what curing the loop gained."""
    first = report.advice[0] if report.advice else None
    measured = slow / fixed
    predicted = first.gain if first is not None else 1.0
    return {
        "loop": name,
        "device": device,
        "first": first.rule if first is not None else None,
        "right": first is not None and first.rule == name,
        "slow_ms": round(slow * 1e3, 3),
        "fixed_ms": round(fixed * 1e3, 3),
        "gain": round(measured, 3),
        "predicted_gain": round(predicted, 3),
        "within_a_third": abs(predicted / measured - 1) <= 1 / 3,
        "others": [(one.rule, round(one.gain, 2)) for one in report.advice[1:4]],
        "seconds": {cause: round(value, 4) for cause, value in report.ranks[0].seconds.items()},
    }


def timed(steps: Any, device: str, seconds: float) -> float:
    """Return the seconds of a step: the median of five runs of eight, so that what happens every few steps counts."""
    for _ in range(9):
        next(steps)
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < 5 and (len(found) < 2 or time.perf_counter() - begin < seconds):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(8):
            next(steps)
        if device == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / 8)
    steps.close()
    return sorted(found)[len(found) // 2]


def on_rank(rank: int, count: int, port: int, name: str, device: str, out: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    row = measure_together(name, device)
    if rank == 0:
        Path(out).write_text(json.dumps(row))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure_together(name: str, device: str) -> dict[str, Any]:
    """Measure with a fixed number of steps: all ranks must take the same."""
    return measure(name, device, seconds=0.0)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(LOOPS))
    parser.add_argument("--device", choices=["cuda"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (_, device, count) in LOOPS.items():
        if args.only and name != args.only:
            continue
        if args.device and name in _ON_BOTH:
            device = args.device
        if device == "cuda" and not torch.cuda.is_available():
            print(json.dumps({"loop": name, "skipped": "needs a GPU"}), flush=True)
            continue
        if count == 1:
            rows.append(measure(name, device))
        else:
            out = f"/tmp/advice-{os.getpid()}.json"
            processes.spawn(on_rank, (count, free_port(), name, device, out), count)
            rows.append(json.loads(Path(out).read_text()))
        print(json.dumps(rows[-1]), flush=True)
    right = sum(row["right"] for row in rows)
    kept = sum(row["right"] and row["within_a_third"] for row in rows)
    total = {"row": "advice", "loops": len(rows), "first_advice_right": right, "gain_within_a_third": kept}
    for name in ("predicted_gain", "gain"):
        total[name] = {f"{row['loop']} ({row['device']})": row[name] for row in rows}
    print(json.dumps(total))


if __name__ == "__main__":
    main()
