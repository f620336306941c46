"""Measurements that share one GPU: each in a process of its own, all compile at once, then each is timed alone.

A measurement is a script called with `--one NAME`. It warms up, calls `my_turn()`, measures, and prints a JSON object.
One in several rounds calls `my_turn()` before each: rounds go through all of them, so that a GPU that grows warm is
slow for all. Where `ready_within` is given, a measurement that warms up for longer is ended, and the others are timed.
"""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

READY = "READY"


def my_turn() -> None:
    """Give back what the warm-up cached, say that it is over, and wait to be called."""
    gc.collect()
    torch: Any = sys.modules.get("torch")  # a measurement of something else leaves the GPU to that
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    print(READY, flush=True)
    if not sys.stdin.readline():
        # The process that asked is gone: measuring now would disturb what runs next.
        raise SystemExit(1)
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


def measure(
    script: str, names: list[str], arguments: list[str], *, rounds: int = 1, ready_within: float | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and result of each, in order; a failure is a result with the last line of the error."""
    # The first are the first to compile where there are fewer cores than measurements.
    begun = [start(script, name, arguments, nice=number // 2) for number, name in enumerate(names)]
    # None is timed while others compile.
    ready = _wait_for_all([process for process, _ in begun], ready_within)
    for _ in range(rounds - 1):
        ready = [came and _has_its_round(process) for (process, _), came in zip(begun, ready, strict=True)]
    for name, (process, error), came in zip(names, begun, ready, strict=True):
        out, _ = process.communicate("go\n" if came else None)
        lines = [text for text in out.splitlines() if text.startswith("{")]
        late = process.returncode == -signal.SIGKILL and ready_within is not None
        wrong = f"not ready within {ready_within:g} s" if late else last_line(error)
        yield name, json.loads(lines[-1]) if lines else {"error": wrong}


def start(script: str, name: str, arguments: list[str], *, nice: int = 0) -> tuple[subprocess.Popen[str], IO[str]]:
    """One measurement in a process of its own, and what it says of errors.

    That goes to a file: a full pipe that nobody reads yet would stop who writes.
    """
    command = ["nice", "-n", str(nice), sys.executable, "-u", script, *arguments, "--one", name]
    errors = tempfile.TemporaryFile("w+")
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True), errors


def last_line(errors: IO[str]) -> str:
    """Of what a process said, which is closed."""
    with errors:
        errors.seek(0)
        return (errors.read().strip().splitlines() or ["no output"])[-1][:300]


def _has_its_round(process: subprocess.Popen[str]) -> bool:
    """Call it, and wait until it waits again; False where it ended instead."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    return _is_ready(process)


def _wait_for_all(processes: list[subprocess.Popen[str]], seconds: float | None) -> list[bool]:
    """Return which processes are ready after at most so many seconds; end those that are not."""
    ready = [False] * len(processes)

    def wait(number: int) -> None:
        ready[number] = _is_ready(processes[number])

    waiting = [threading.Thread(target=wait, args=(number,), daemon=True) for number in range(len(processes))]
    for thread in waiting:
        thread.start()
    deadline = None if seconds is None else time.monotonic() + seconds
    for process, thread in zip(processes, waiting, strict=True):
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            process.kill()
    for thread in waiting:
        thread.join()
    return ready


def _is_ready(process: subprocess.Popen[str]) -> bool:
    """Wait until it says so; False where it ended instead."""
    assert process.stdout is not None
    return any(line.strip() == READY for line in iter(process.stdout.readline, ""))
