"""Run a script in Triton's interpreter, which executes the code of a kernel on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.patience import HANG_S


def interpret(script: str) -> None:
    """Run a script in a process of its own; skip the test where Triton is not installed."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=HANG_S)
