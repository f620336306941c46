"""Report the operators that take the time of a step, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from piledriver.observe.memory import readable


def profile_step(step: Callable[[], Any], *, warm_up: int = 1, repeats: int = 3, top: int = 15) -> str:
    """Run a step a few times under the profiler and return a report as text."""
    for _ in range(warm_up):
        step()
    chosen = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=chosen, profile_memory=True, acc_events=True) as profiler:
        for _ in range(repeats):
            step()
    return profile_report(profiler, top=top)


def profile_report(profiler: Any, *, top: int = 15) -> str:
    """The operators that take the most time of their own, with their share, calls and memory.

    The time is the device's where a device was profiled, else the host's.
    """
    rows = profiler.key_averages()
    on_device = any(getattr(row, "self_device_time_total", 0) > 0 for row in rows)
    field = "self_device_time_total" if on_device else "self_cpu_time_total"
    memory = "self_device_memory_usage" if on_device else "self_cpu_memory_usage"
    total = sum(getattr(row, field) for row in rows) or 1
    ordered = sorted(rows, key=lambda row: -getattr(row, field))[:top]
    width = max([len(row.key[:60]) for row in ordered] + [len("operator")])
    lines = [
        f"{total / 1000:.2f} ms of {'device' if on_device else 'host'} time in {len(rows)} kinds of operators",
        f"{'operator':<{width}}  {'share':>6}  {'time':>10}  {'calls':>6}  {'each':>9}  memory",
    ]
    for row in ordered:
        taken = getattr(row, field)
        lines.append(
            f"{row.key[:60]:<{width}}  {taken / total:>6.1%}  {taken / 1000:>7.2f} ms  {row.count:>6}  "
            f"{taken / max(row.count, 1):>6.1f} us  {readable(getattr(row, memory, 0))}"
        )
    return "\n".join(lines)
