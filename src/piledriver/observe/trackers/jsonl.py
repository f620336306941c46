"""The built-in tracker: one JSON object per line in `metrics.jsonl`."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from piledriver.core.storage import Location, write_text
from piledriver.observe.trackers.base import GeneralTracker, Values
from piledriver.observe.trackers.line_writer import LineWriter
from piledriver.observe.trackers.values import copy_values, plain_values

# `json.dumps` with a default would make one for every line. Nearly all lines are finite numbers, which the strict one
# writes as they are; it fails at the others.
_STRICT = json.JSONEncoder(default=plain_values, allow_nan=False)
_ENCODER = json.JSONEncoder(default=str)


class JsonlTracker(GeneralTracker):
    """Appends to `logging_dir/run_name/metrics.jsonl`; the configuration is in `config.json` beside it.

    A call puts its values into a queue; a thread writes the lines, twice a second, and the rest when the process ends.
    A process that is killed loses the lines of its last half second at most. Whole lines are appended in one write, so
    that lines never mix and only the last one can be truncated; a resumed run starts on a new line.
    """

    name = "jsonl"
    requires_logging_directory = True
    is_local = True
    """It is called in the calling thread, and copies what it keeps."""

    def __init__(self, run_name: str, logging_dir: Location) -> None:
        super().__init__()
        self.folder = Path(logging_dir) / run_name
        self._lines: LineWriter | None = None

    @property
    def path(self) -> Path:
        """Return the path of `metrics.jsonl`."""
        return self.folder / "metrics.jsonl"

    @property
    def tracker(self) -> Path:
        """Return the path of `metrics.jsonl`."""
        return self.path

    def start(self) -> None:
        """Open the file, and end a line that a crash truncated."""
        self.folder.mkdir(parents=True, exist_ok=True)
        cut_off = self.path.is_file() and not _ends_a_line(self.path)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if cut_off:
            os.write(descriptor, b"\n")
        self._lines = LineWriter(descriptor, _line)

    def store_init_configuration(self, values: Values) -> None:
        """Write `config.json`."""
        write_text(self.folder / "config.json", json.dumps(_finite(plain_values(values)), indent=1, default=str) + "\n")

    def log(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Queue one line: `{"time": ..., "step": ..., ...}`. Raises the error of an earlier write, if there was one."""
        if self._lines is None:
            self.start()
        assert self._lines is not None
        self._lines.put((time.time(), step, copy_values(values), kwargs))

    def finish(self) -> None:
        """Write what is queued, sync the file and close it."""
        if self._lines is not None:
            lines, self._lines = self._lines, None
            lines.close(sync=True)


def _line(entry: tuple[float, int | None, dict[str, Any], dict[str, Any]]) -> bytes:
    now, step, values, further = entry
    try:
        return _STRICT.encode({"time": round(now, 3), "step": step, **values, **further}).encode() + b"\n"
    except (ValueError, TypeError):
        record = {"time": round(now, 3), "step": step, **_finite(plain_values(values)), **further}
        return _ENCODER.encode(record).encode() + b"\n"


def read_jsonl(path: Location) -> list[dict[str, Any]]:
    """Return the records of a file, without a truncated last line."""
    records = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def _ends_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _finite(value: Any) -> Any:
    """Return values with NaN and infinity as strings, which JSON lacks."""
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value  # a float of NumPy
