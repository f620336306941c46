"""`piledriver watch` on many runs: time until the page has its data, long charts, CPU when nothing changes; and what
the system monitor and the leak watch cost a run.

    python benchmarks/watch.py [--runs 1000] [--metrics 200] [--rows 50] [--idle-seconds 20]

Prints one JSON line. The requests are those that the page makes when it opens; the server is the command itself.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import psutil


def make_runs(root: Path, runs: int, metrics: int, rows: int) -> None:
    luck = random.Random(0)
    names = ["loss", *(f"group{number % 10}/metric_{number}" for number in range(metrics - 1))]
    lines = []
    for step in range(1, rows + 1):
        values = {name: round(luck.random(), 6) for name in names}
        lines.append(json.dumps({"step": step, "time": 1e9 + step, "tokens": 1000 * step, **values}))
    text = "\n".join(lines) + "\n"
    for number in range(runs):
        folder = root / f"run-{number:04d}"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(text)
        (folder / "resolved.yaml").write_text(f"seed: {number}\nrun:\n  steps: {rows}\n")


class Page:
    """A client that asks for what the page asks for."""

    def __init__(self, address: str) -> None:
        self.base, _, self.token = address.partition("/?token=")

    def get(self, path: str, **query: Any) -> bytes:
        url = f"{self.base}{path}?{urllib.parse.urlencode(query, doseq=True)}"
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def api(self, path: str, **query: Any) -> Any:
        return json.loads(self.get(f"/api/{path}", **query))

    def open(self) -> dict[str, Any]:
        self.get("/", token=self.token)
        listed = self.api("runs")
        chosen = [run["id"] for run in listed["runs"][:4]]
        names = self.api("names", run=chosen)
        for run in chosen:
            self.api("run", run=run)
        visible = names[chosen[0]]["metrics"][:12]
        self.api("series", run=chosen, metric=visible, points=1000)
        self.api("log", run=chosen[0])
        return listed


def start(folder: Path) -> tuple[subprocess.Popen[str], Page]:
    command = [sys.executable, "-m", "piledriver.cli.main", "watch", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    return process, Page(process.stdout.readline().split(": ")[1].strip())


def cost_of_watching(samples: int = 200, steps: int = 20_000) -> dict[str, float]:
    """CPU time of the monitor at its default interval, and of the leak watch per step of a loop that leaks nothing."""
    from piledriver.observe.leaks.watch import LeakWatch
    from piledriver.observe.monitor import SystemMonitor

    monitor = SystemMonitor()
    monitor.sample()
    before = time.process_time()
    for _ in range(samples):
        monitor.sample()
    per_sample = (time.process_time() - before) / samples
    watch = LeakWatch()
    before = time.process_time()
    for _ in range(steps):
        watch.step()
    per_step = (time.process_time() - before) / steps
    return {
        "monitor_percent_of_a_core": round(100 * per_sample / 5.0, 4),
        "leak_watch_microseconds_a_step": round(1e6 * per_step, 2),
    }


def measure(runs: int, metrics: int, rows: int, idle_seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        many, long = root / "many", root / "long"
        many.mkdir()
        (long / "one").mkdir(parents=True)
        make_runs(many, runs, metrics, rows)
        begun = time.perf_counter()
        process, page = start(many)
        try:
            listening = time.perf_counter() - begun
            opened_at = time.perf_counter()
            listed = page.open()
            opened = time.perf_counter() - opened_at
            assert len(listed["runs"]) == runs
            again_at = time.perf_counter()
            page.open()
            again = time.perf_counter() - again_at
            version = page.api("changes", since="", wait=0)["version"]
            watched = psutil.Process(process.pid)
            before, at = sum(watched.cpu_times()[:2]), time.perf_counter()
            while time.perf_counter() - at < idle_seconds:
                page.api("changes", since=version, wait=10)
            idle = (sum(watched.cpu_times()[:2]) - before) / (time.perf_counter() - at)
            memory = watched.memory_info().rss
        finally:
            process.terminate()
            process.wait()
        points = 100_000
        with open(long / "one/metrics.jsonl", "w") as file:
            for step in range(points):
                file.write(json.dumps({"step": step, "loss": 3.0 + (step * 7919 % 1000) / 1000}) + "\n")
        process, page = start(long)
        try:
            key = page.api("runs")["runs"][0]["id"]
            page.api("names", run=key)
            zoomed_at = time.perf_counter()
            for zoom in range(20):
                page.api("series", run=key, metric="loss", points=1400, **{"from": 1000 * zoom, "to": points - zoom})
            chart = (time.perf_counter() - zoomed_at) / 20
        finally:
            process.terminate()
            process.wait()
    return {
        "row": "watch",
        "ours": {
            "start_seconds": round(listening, 3),
            "open_seconds": round(opened, 3),
            "start_and_open_seconds": round(listening + opened, 3),
            "open_again_seconds": round(again, 3),
            "idle_percent_of_a_core": round(100 * idle, 3),
            "memory_mb": round(memory / 1e6, 1),
            "chart_of_100k_points_ms": round(1e3 * chart, 2),
            **cost_of_watching(),
        },
        "runs": runs,
        "metrics": metrics,
        "rows": rows,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--metrics", type=int, default=200)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    given = parser.parse_args()
    print(json.dumps(measure(given.runs, given.metrics, given.rows, given.idle_seconds)))
