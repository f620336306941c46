"""All runs that a page shows, with the columns of those that it asked for."""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from piledriver.observe.watch.discover import changed, find_runs
from piledriver.observe.watch.downsample import averages, downsample
from piledriver.observe.watch.metrics_file import MetricsFile
from piledriver.observe.watch.run import Run

# Values in memory, over all runs, before the runs that were not asked for lately are dropped.
_MOST_VALUES = 40_000_000
_MOST_RANKS = 4096
_CHECK_FOLDERS_S, _CHECK_OLD_RUNS_S, _OLD_S = 10.0, 10.0, 120.0


class Workspace:
    """Run folders below some roots. Methods may be called from several threads."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = list(roots)
        self._lock = threading.RLock()
        self._runs: dict[str, Run] = {}
        self._searched: dict[str, int] = {}
        self._files: OrderedDict[str, MetricsFile] = OrderedDict()
        self._ranks: OrderedDict[str, dict[str, MetricsFile]] = OrderedDict()
        self._states: dict[str, tuple[int, int, int] | None] = {}
        self._folders_at = self._old_at = -math.inf
        self._changes, self._start = 0, secrets.token_hex(4)
        self._search()

    def __len__(self) -> int:
        return len(self._runs)

    def run(self, key: str) -> Run | None:
        """Return a run by its id."""
        return self._runs.get(key)

    def listing(self) -> list[dict[str, Any]]:
        """Return the summary of every run, the one changed last first."""
        with self._lock:
            found = [run.summary() for run in self._runs.values()]
        return sorted(found, key=lambda one: (-one["changed"], one["name"]))

    def version(self) -> str:
        """Return a text that changes when a run does: folders and finished runs are looked at less often."""
        with self._lock:
            now = time.monotonic()
            if now - self._folders_at > _CHECK_FOLDERS_S:
                self._folders_at = now
                if changed(self._searched):
                    self._search()
            all_of_them = now - self._old_at > _CHECK_OLD_RUNS_S
            if all_of_them:
                self._old_at = now
            recently = (time.time() - _OLD_S) * 1e9
            for key, run in self._runs.items():
                state = self._states.get(key)
                if all_of_them or state is None or state[2] > recently:
                    now_state = run.state()
                    if now_state != state or key not in self._states:
                        self._states[key] = now_state
                        self._changes += 1
            return f"{self._start}-{self._changes}"

    def columns(self, run: Run) -> MetricsFile:
        """Return the metrics of a run, read up to now."""
        with self._lock:
            file = self._files.get(run.id)
            if file is None:
                file = self._files[run.id] = MetricsFile(run.metrics)
            self._files.move_to_end(run.id)
            file.refresh()
            held = sum(one.values for one in self._files.values())
            while held > _MOST_VALUES and len(self._files) > 1:
                _, dropped = self._files.popitem(last=False)
                held -= dropped.values
            return file

    def series(
        self, runs: Sequence[Run], names: Sequence[str], *, x: str, points: int, low: float, high: float
    ) -> dict[str, Any]:
        """Return {run id: {metric: its curve}} within a range of x, reduced to a number of points."""
        found: dict[str, Any] = {}
        with self._lock:
            for run in runs:
                file = self.columns(run)
                found[run.id] = {name: _reduced(*file.series(name, x), points, low, high) for name in names}
        return found

    def rank_names(self, run: Run) -> list[str]:
        """Return the metrics that the ranks of a run write."""
        with self._rank_files(run) as files:
            return list(dict.fromkeys(name for file in files.values() for name in file.names))

    def heat_map(self, run: Run, name: str, columns: int) -> dict[str, Any]:
        """Return a metric of every rank over time: rows of means, from the first to the last sample."""
        with self._rank_files(run) as files:
            curves = {rank: file.series(name, "clock") for rank, file in files.items()}
            curves = {rank: curve for rank, curve in curves.items() if len(curve[0])}
            if not curves:
                return {"ranks": [], "values": [], "from": None, "to": None}
            begin = min(float(times[0]) for times, _ in curves.values())
            end = max(float(times[-1]) for times, _ in curves.values())
            most = max(len(times) for times, _ in curves.values())
            edges = np.linspace(begin, max(end, begin + 1e-3), min(columns, max(1, most)) + 1)
            return {
                "ranks": list(curves),
                "from": begin,
                "to": end,
                "values": [_plain(averages(*curve, edges)) for curve in curves.values()],
            }

    @contextmanager
    def _rank_files(self, run: Run) -> Iterator[dict[str, MetricsFile]]:
        folder = run.file("ranks")
        with self._lock:
            names: list[str] = []
            if not os.path.islink(folder):
                try:
                    names = sorted(name for name in os.listdir(folder) if name.endswith(".jsonl"))[:_MOST_RANKS]
                except OSError:
                    names = []
            known = self._ranks.setdefault(run.id, {})
            self._ranks.move_to_end(run.id)
            if len(self._ranks) > 8:
                self._ranks.popitem(last=False)
            rows = max(512, (1 << 16) // max(1, len(names)))
            for name in names:
                label = name.removesuffix(".jsonl").lstrip("0")[:40] or "0"
                if label not in known:
                    known[label] = MetricsFile(os.path.join(folder, name), most_rows=rows)
                known[label].refresh(8 << 20)
            yield known

    def _search(self) -> None:
        paths, self._searched = find_runs(self._roots)
        known = {run.path: run for run in self._runs.values()}
        runs = [known.get(path) or Run(path, name) for path, name in paths.items()]
        self._runs = {run.id: run for run in runs}
        self._changes += 1
        self._states = {key: state for key, state in self._states.items() if key in self._runs}


def _reduced(x: np.ndarray, y: np.ndarray, points: int, low: float, high: float) -> dict[str, Any]:
    inside = (x >= low) & (x <= high)
    if not inside.all():
        # One more on each side, so that the line reaches the edge of the chart.
        at = np.flatnonzero(inside)
        if len(at):
            inside[max(0, at[0] - 1) : at[-1] + 2] = True
        x, y = x[inside], y[inside]
    finite = y[np.isfinite(y)]
    curve = downsample(x, y, points)
    found = {"x": _plain(curve.x), "y": _plain(curve.mean), "n": len(y), "bad": int(len(y) - len(finite))}
    if len(curve.x) < len(y):
        found |= {"low": _plain(curve.low), "high": _plain(curve.high)}
    return found | {"last": float(finite[-1]) if len(finite) else None}


def _plain(values: np.ndarray) -> list[float | None]:
    """Return numbers for JSON; what is not finite is null."""
    return [float(f"{value:.9g}") if math.isfinite(value) else None for value in values.tolist()]
