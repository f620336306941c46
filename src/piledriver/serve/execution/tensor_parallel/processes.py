"""The processes of `piledriver serve --tp N`: this one is rank 0 and starts the others with its own arguments."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from piledriver.runtime import environment

_PARENT = "PILEDRIVER_SERVE_PARENT"


def start_ranks(count: int, arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start `piledriver` with these arguments as ranks 1 to `count` - 1 and make this process rank 0."""
    place = tempfile.mkdtemp(prefix="piledriver-")
    common = {
        environment.RENDEZVOUS_FILE: os.path.join(place, "rendezvous"),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    inherited = environment.snapshot()
    started = []
    for rank in range(1, count):
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), _PARENT: str(os.getpid())}
        command = [sys.executable, "-m", "piledriver.cli.main", *arguments]
        started.append(subprocess.Popen(command, env={**inherited, **common, **mine}, stdout=subprocess.DEVNULL))
    environment.update({**common, "RANK": "0", "LOCAL_RANK": "0"})
    return started


def end_with_parent() -> None:
    """End this process when the one that started it is gone, however it ended."""
    parent = environment.snapshot().get(_PARENT)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="piledriver-parent", daemon=True).start()
