"""The log of a run: `log.txt` in its folder, with every message and a line of metrics every few seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import IO, Any

from piledriver.train.reporting.display import Display, described

FILE = "log.txt"
_EVERY_S = 10.0


class LoggedDisplay:
    """A display that writes what it shows to a file as well; without a file it only shows."""

    def __init__(self, shown: Display, file: IO[str] | None, total_steps: int) -> None:
        self._shown, self._file, self._total = shown, file, total_steps
        self._last = -_EVERY_S

    def show(self, figures: Mapping[str, Any]) -> None:
        """Show the metrics of a step; a step now and then, validations and the last step are written."""
        self._shown.show(figures)
        now, step = time.monotonic(), figures["step"]
        if now - self._last >= _EVERY_S or step == self._total or "validation/all" in figures:
            self._last = now
            self._write(
                f"step {step}/{self._total}: " + ", ".join(f"{name} {text}" for name, text in described(figures))
            )

    def say(self, text: str) -> None:
        """Show and write a message."""
        self._shown.say(text)
        self._write(text)

    def _write(self, text: str) -> None:
        if self._file is not None:
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(text.split())}\n")
            self._file.flush()


def open_log(out: str, *, is_main: bool) -> IO[str] | None:
    """Open `log.txt` of a run for appending; None on ranks other than 0."""
    return open(os.path.join(out, FILE), "a", encoding="utf-8") if is_main else None
