"""System metrics of every rank in a run folder: `ranks/00003.jsonl`, and a summary over ranks for the trackers."""

from __future__ import annotations

import json
import math
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

FOLDER = "ranks"
_TAIL_BYTES = 8192
# A row older than this is of a rank that stopped; it is left out of the summary.
_STALE_S = 120.0
# Totals since the boot of the machine; their rates are written instead.
_TOTALS = frozenset({"network/sent_bytes", "network/received_bytes", "disk/read_bytes", "disk/written_bytes"})


class RankLog:
    """A sink of `SystemMonitor` for one rank: appends a line per sample, with the step and its mean duration.

    Ranks share nothing but the folder, so that a sample costs no collective. `take` on rank 0 returns the mean and the
    maximum over ranks, once per sample, to be logged with the next step.
    """

    def __init__(self, folder: str | Path, rank: int, size: int) -> None:
        self._folder, self._rank, self._size = Path(folder) / FOLDER, rank, size
        self._lock = threading.Lock()
        self._step: int | None = None
        # Totals, which only the loop's thread changes: a step needs no lock.
        self._steps, self._seconds, self._waited = 0, 0.0, 0.0
        self._sampled = (0, 0.0, 0.0)
        self._pending: dict[str, float] = {}

    def step(self, step: int, *, seconds: float, data_seconds: float = 0.0) -> None:
        """Record that a step was taken, and how long it waited for its data."""
        self._step = step
        self._seconds += seconds
        self._waited += data_seconds
        self._steps += 1

    def __call__(self, sample: dict[str, float]) -> None:
        """Append one line; called by the monitor's thread."""
        row = {name: value for name, value in sample.items() if name not in _TOTALS}
        with self._lock:
            before, self._sampled = self._sampled, (self._steps, self._seconds, self._waited)
            steps, seconds, waited = (now - then for now, then in zip(self._sampled, before, strict=True))
        if steps:
            row |= {"step_seconds": seconds / steps, "data_wait_seconds": waited / steps}
        step = self._step
        line = json.dumps({"time": round(time.time(), 3), "step": step, **_finite(row)})
        self._folder.mkdir(parents=True, exist_ok=True)
        # One write to a file opened for appending: a line is whole, or the last one of a rank that was killed.
        descriptor = os.open(self._folder / f"{self._rank:05d}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)
        if self._rank == 0:
            found = self._over_ranks(row)
            with self._lock:
                self._pending = found

    def take(self) -> dict[str, float]:
        """Return the summary of the last sample as `system/...`, {} if it was taken already."""
        if not self._pending:  # nearly always: a step waits for no lock
            return {}
        with self._lock:
            found, self._pending = self._pending, {}
        return found

    def _over_ranks(self, own: dict[str, float]) -> dict[str, float]:
        rows = [own]
        rows += [row for rank in range(1, self._size) if (row := _last_row(self._folder / f"{rank:05d}.jsonl"))]
        found: dict[str, float] = {}
        for name in own:
            values = [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]
            found[f"system/{name}"] = statistics.fmean(values)
            if self._size > 1:
                found[f"system/{name}_max"] = max(values)
        return found


def _last_row(path: Path) -> dict[str, Any] | None:
    """Return the last whole row of a rank's file, None without one or if it is stale."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).split(b"\n")
        row = json.loads(lines[-2])
        return row if time.time() - row["time"] < _STALE_S else None
    except (OSError, ValueError, IndexError, TypeError, KeyError):
        return None


def _finite(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if math.isfinite(value)}
