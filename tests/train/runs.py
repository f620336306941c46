"""`piledriver train` as a user runs it: start it, kill it, read what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.patience import HANG_S

VERB = [sys.executable, "-m", "piledriver.cli.main"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def start(config: str, out: Path, processes: int = 1, *overrides: str) -> subprocess.Popen[str]:
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.parent / "config.yaml"
    path.write_text(config)
    command = [*VERB, "train", str(path), f"out={out}", *overrides]
    if processes > 1:
        launch = ["launch", "--nproc", str(processes), "--max-restarts", "0", "--module", "piledriver.cli.main"]
        command = [*VERB, *launch, "train", str(path), f"out={out}", *overrides]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **pipes, env=ENVIRONMENT, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> int:
    said, _ = process.communicate(timeout=HANG_S)
    assert process.returncode in (0, 75), said
    return process.returncode


def kill_when(process: subprocess.Popen[str], happened: Callable[[], bool]) -> bool:
    """kill -9, all processes of it, once something has happened; whether it lived so long."""
    while process.poll() is None:
        if happened():
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return True
        time.sleep(0.01)
    process.communicate()
    return False


def curve(out: Path) -> dict[int, float]:
    """The loss of each step, as it was last taken."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def lines_of(out: Path) -> int:
    return len((out / "metrics.jsonl").read_text().splitlines()) if (out / "metrics.jsonl").exists() else 0


def weights(out: Path) -> dict[str, Any]:
    return {name: array.tobytes() for name, array in load_file(out / "model" / "model.safetensors").items()}
