"""`start_server`: `piledriver serve` in a process of its own, for a program that talks to it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from piledriver.core.errors import PiledriverError


@dataclass(frozen=True)
class BackgroundServer:
    """A server that runs in another process."""

    url: str
    pid: int
    child: subprocess.Popen[bytes] | None = None
    """The process, if this one started it."""

    def stop(self, timeout_s: float = 60.0) -> None:
        """Let running requests finish and end the process; return when it is gone."""
        try:
            process = psutil.Process(self.pid)
            process.send_signal(signal.SIGTERM)
            process.wait(timeout_s)
        except psutil.NoSuchProcess:
            return
        except psutil.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            if self.child is not None:
                self.child.wait()


def start_server(
    folder: str | Path, words: Sequence[str] = (), *, log: str | Path = os.devnull, timeout_s: float = 600.0
) -> BackgroundServer:
    """Start a server with arguments of `piledriver serve` and return it once it answers."""
    command = [sys.executable, "-m", "piledriver.cli.main", "serve", str(folder), *words]
    with open(log, "ab") as errors:
        # A session of its own: Ctrl-C in the caller's terminal must not end a server that others use.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    assert process.stdout is not None
    line, deadline = b"", time.monotonic() + timeout_s
    with process.stdout as output:
        while b"\n" not in line and time.monotonic() < deadline:
            if select.select([output], [], [], 1.0)[0]:
                piece = os.read(output.fileno(), 4096)
                if not piece:
                    break
                line += piece
    if b"http://" not in line:
        process.kill()
        process.wait()
        raise PiledriverError(
            f"the server of {folder} did not start", fix=f"read {log}, or run: {' '.join(command[2:])}"
        )
    return BackgroundServer("http://" + line.decode().split("http://")[1].split()[0], process.pid, process)
