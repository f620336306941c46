"""Run a script in Triton's interpreter, which executes the code of a kernel on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy
import pytest
from packaging.version import Version

from tests.patience import HANG_S


def interpret(script: str) -> None:
    """Run a script in a process of its own; skip the test where Triton is not installed, or does not fit NumPy."""
    triton = pytest.importorskip("triton")
    if Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"):
        pytest.skip("Triton's interpreter before 3.7 makes scalars of arrays, which NumPy 2.4 refuses")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=HANG_S)
