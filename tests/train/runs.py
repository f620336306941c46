"""`piledriver train` on one process or several: start it, kill it, read what it left."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from piledriver.cli.main import main
from tests.checkpoint.processes import Started

VERB = [sys.executable, "-m", "piledriver.cli.main"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def start(config: str, out: Path, processes: int = 1, *overrides: str) -> Started:
    """Start the verb without the seconds of its imports."""
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.parent / "config.yaml"
    path.write_text(config)
    words = ["train", str(path), f"out={out}", *overrides]
    return Started(main, words, output=out.parent / "output.txt", processes=processes)


def finish(run: Started) -> int:
    code = run.wait()
    assert code in (0, 75), run.output.read_text()
    return code


def kill_when(run: Started, happened: Callable[[], bool]) -> bool:
    """kill -9, all processes of it, once something has happened; whether it lived so long."""
    while not run.ended():
        if happened():
            run.signal(signal.SIGKILL)
            run.wait()
            return True
        time.sleep(0.01)
    run.wait()
    return False


def curve(out: Path) -> dict[int, float]:
    """The loss of each step, as it was last taken."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def lines_of(out: Path) -> int:
    return len((out / "metrics.jsonl").read_text().splitlines()) if (out / "metrics.jsonl").exists() else 0


def weights(out: Path) -> dict[str, Any]:
    return {name: array.tobytes() for name, array in load_file(out / "model" / "model.safetensors").items()}
