"""Measurements that share one GPU: each in a process of its own, all compile at once, then each is timed alone.

A measurement is a script called with `--one NAME`. It warms up, calls `my_turn()`, measures, and prints a JSON object.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

READY = "READY"


def my_turn() -> None:
    """Give back what the warm-up cached, say that it is over, and wait to be called."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    print(READY, flush=True)
    sys.stdin.readline()
    torch.cuda.reset_peak_memory_stats()


def with_patience(step: Callable[[], Any], seconds: float = 240.0) -> Any:
    """Take a step while others warm up too: where the device is full, wait."""
    import time

    import torch

    begun = time.monotonic()
    while True:
        try:
            return step()
        except torch.OutOfMemoryError:
            if time.monotonic() - begun > seconds:
                raise
        gc.collect()
        torch.cuda.empty_cache()
        time.sleep(1.0)


def measure(script: str, names: list[str], arguments: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and result of each, in order; a failure is a result with the last line of the error."""
    command = [sys.executable, "-u", script, *arguments, "--one"]
    begun = [
        subprocess.Popen(
            [*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name in names
    ]
    for name, process in zip(names, begun, strict=True):
        assert process.stdout is not None
        line = "begin"
        while line and line.strip() != READY:
            line = process.stdout.readline()
        out, err = process.communicate("go\n" if line else None)
        lines = [text for text in out.splitlines() if text.startswith("{")]
        wrong = (err.strip().splitlines() or ["no output"])[-1]
        yield name, json.loads(lines[-1]) if lines else {"error": wrong[:300]}
