"""Columns of a metrics file, read incrementally: each refresh reads what was appended since the last one."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator

import numpy as np

from piledriver.observe.watch.files import opened, status
from piledriver.observe.watch.rows import NAME_LENGTH, numbers_of, parse_row

_CHUNK = 4 << 20
_LONGEST_LINE = 1 << 20
_MOST_METRICS = 2000
# A file over this size is read at evenly spaced places only, when it is first opened.
_WHOLE_UP_TO = 64 << 20
_SAMPLE, _SAMPLE_BLOCK = 8 << 20, 16 << 10
_NOT_A_METRIC = frozenset({"step", "time", "tokens"})


class MetricsFile:
    """Numbers of a `metrics.jsonl` by name, with the step, time and tokens of their rows.

    Lines that are truncated, damaged or too long are skipped. Beyond `most_rows` rows, every second one is dropped.
    """

    def __init__(self, path: str, most_rows: int = 1 << 20) -> None:
        self.path, self._most_rows = path, most_rows
        self._reset()

    def _reset(self) -> None:
        self._inode, self._offset, self._rest = 0, 0, b""
        self._skipping = False
        self._stride, self._seen = 1, 0
        self._step, self._time, self._tokens = array("d"), array("d"), array("d")
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._last_step = math.nan
        self.sampled = 1.0
        """Share of the file that was read, 1 unless it is very large."""
        self.version = 0
        """Changes whenever values were added."""

    @property
    def names(self) -> list[str]:
        """Names of the metrics, in the order of the file."""
        return list(self._columns)

    @property
    def rows(self) -> int:
        """Number of rows in memory."""
        return len(self._step)

    @property
    def values(self) -> int:
        """Number of values in memory."""
        return sum(len(values) for _, values in self._columns.values())

    def refresh(self, budget_bytes: int = 256 << 20) -> None:
        """Read what was appended, at most `budget_bytes` of it; a file that was replaced is read anew."""
        found = status(self.path)
        if found is None:
            return
        inode, size, _ = found
        if inode != self._inode or size < self._offset:
            self._reset()
            self._inode = inode
        if size == self._offset:
            return
        with opened(self.path) as descriptor:
            if descriptor is None:
                return
            if self._offset == 0 and size > _WHOLE_UP_TO:
                self._read_samples(descriptor, size)
            until = min(size, self._offset + budget_bytes)
            while self._offset < until:
                chunk = os.pread(descriptor, min(_CHUNK, until - self._offset), self._offset)
                if not chunk:
                    break
                self._offset += len(chunk)
                self._add(chunk)
        self.version += 1

    def series(self, name: str, x: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """Return (x, y) of a metric; x is the step, the seconds since the first row (`time`), the time itself
        (`clock`), or the tokens.

        Of a step that was repeated after a resume or a roll-back, and of the steps after it, the last values count.
        """
        column = self._columns.get(name)
        if column is None:
            return np.empty(0), np.empty(0)
        # Copies: an array with an exported buffer cannot grow.
        rows, values = np.array(column[0], dtype=np.int64), np.array(column[1])
        steps = np.array(self._step)[rows]
        kept = np.ones(len(steps), dtype=bool)
        if len(steps) > 1:
            smallest_after = np.minimum.accumulate(steps[::-1])[::-1]
            kept[:-1] = ~(steps[:-1] >= smallest_after[1:])
        at = {"time": self._time, "clock": self._time, "tokens": self._tokens}.get(x, self._step)
        along = np.array(at)[rows[kept]]
        if x == "time" and len(along):
            along = along - np.nanmin(np.array(self._time))
        known = np.isfinite(along)
        return along[known], values[kept][known]

    def _read_samples(self, descriptor: int, size: int) -> None:
        """Read evenly spaced blocks of a very large file, without the partial lines at their ends."""
        blocks = _SAMPLE // _SAMPLE_BLOCK
        end = 0
        for at in np.linspace(0, size - _SAMPLE_BLOCK, blocks, dtype=np.int64).tolist():
            block = os.pread(descriptor, _SAMPLE_BLOCK, at)
            begin, end = block.find(b"\n") + 1, block.rfind(b"\n") + 1
            self._add(block[begin if at else 0 : end])
        # Reading continues after the last whole line, or after the end of a line that has none.
        self._offset = size - _SAMPLE_BLOCK + end if end else size
        self._rest, self._skipping = b"", not end
        self.sampled = _SAMPLE / size

    def _add(self, chunk: bytes) -> None:
        for line in self._lines(chunk):
            row = parse_row(line) if line else None
            if row is not None:
                self._add_row(row)

    def _lines(self, chunk: bytes) -> Iterator[bytes]:
        """Yield whole lines; a line over the limit is dropped while it is being read."""
        *lines, rest = chunk.split(b"\n")
        if lines:
            first = self._rest + lines[0]
            if not self._skipping and len(first) <= _LONGEST_LINE:
                yield first
            yield from (line for line in lines[1:] if len(line) <= _LONGEST_LINE)
            self._rest, self._skipping = rest, False
        elif not self._skipping:
            self._rest += rest
        if len(self._rest) > _LONGEST_LINE:
            self._rest, self._skipping = b"", True

    def _add_row(self, row: dict[str, object]) -> None:
        self._seen += 1
        if self._seen % self._stride:
            return
        at = len(self._step)
        step, tokens, when = (_number(row.get(name)) for name in ("step", "tokens", "time"))
        if math.isnan(step):
            # A row without a step belongs to the one before; a file without any step is counted.
            step = float(at) if math.isnan(self._last_step) else self._last_step
        else:
            self._last_step = step
        self._step.append(step)
        self._time.append(when)
        self._tokens.append(tokens)
        columns = self._columns
        for name, value in numbers_of(row):
            column = columns.get(name)
            if column is None:
                if name in _NOT_A_METRIC or len(columns) >= _MOST_METRICS or len(name) > NAME_LENGTH:
                    continue
                column = columns[name] = (array("i"), array("d"))
            column[0].append(at)
            column[1].append(value)
        if len(self._step) >= self._most_rows:
            self._thin_out()

    def _thin_out(self) -> None:
        """Drop every second row, and read every second one from now on."""
        self._stride *= 2
        self._step, self._time, self._tokens = self._step[::2], self._time[::2], self._tokens[::2]
        for name, (rows, values) in self._columns.items():
            old, held = np.array(rows), np.array(values)
            kept = old % 2 == 0
            self._columns[name] = (array("i", (old[kept] // 2).tolist()), array("d", held[kept].tolist()))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan
