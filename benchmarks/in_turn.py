"""Measurements that share one GPU: each in a process of its own, all compile at once, then each is timed alone.

A measurement is a script called with `--one NAME`. It warms up, calls `my_turn()`, measures, and prints a JSON object.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

READY = "READY"


def my_turn() -> None:
    """Give back what the warm-up cached, say that it is over, and wait to be called."""
    gc.collect()
    torch: Any = sys.modules.get("torch")  # a measurement of something else leaves the GPU to that
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    print(READY, flush=True)
    sys.stdin.readline()
    if torch is not None and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def with_patience(step: Callable[[], Any], seconds: float = 240.0) -> Any:
    """Take a step while others warm up too: where the device is full, wait."""
    begun = time.monotonic()
    while True:
        try:
            return step()
        except Exception as error:
            if "out of memory" not in str(error).lower() or time.monotonic() - begun > seconds:
                raise
        gc.collect()
        torch: Any = sys.modules.get("torch")
        if torch is not None:
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
    # Nobody is timed while others compile.
    ready = [_is_ready(process) for process in begun]
    for name, process, came in zip(names, begun, ready, strict=True):
        out, err = process.communicate("go\n" if came else None)
        lines = [text for text in out.splitlines() if text.startswith("{")]
        wrong = (err.strip().splitlines() or ["no output"])[-1]
        yield name, json.loads(lines[-1]) if lines else {"error": wrong[:300]}


def _is_ready(process: subprocess.Popen[str]) -> bool:
    """Wait until it says so; False where it ended instead."""
    assert process.stdout is not None
    return any(line.strip() == READY for line in iter(process.stdout.readline, ""))
