"""Remember the lines that open files, while asked to."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from types import FrameType

from piledriver.observe.leaks.lines import FRAMES, SourceLine, line_of

_recorders: list[OpenRecorder] = []
_installed = False


class OpenRecorder:
    """Records, between `start` and `stop`, which line opens which path.

    Python calls an audit hook for every `open`. A hook cannot be removed, so one is installed at the first `start`; it
    costs a list lookup per event when nothing records.
    """

    def __init__(self) -> None:
        self._lines: dict[str, Counter[SourceLine]] = defaultdict(Counter)
        self._before: set[int] = set()

    def start(self) -> None:
        """Begin to record; files that are open now do not count."""
        global _installed
        self._before = set(_descriptors())
        _recorders.append(self)
        if not _installed:
            _installed = True
            sys.addaudithook(_audit)

    def stop(self) -> dict[SourceLine, int]:
        """Stop, and return how many files that are still open each line has opened."""
        _recorders.remove(self)
        found: Counter[SourceLine] = Counter()
        for descriptor, path in _descriptors().items():
            lines = self._lines.get(path)
            if descriptor not in self._before and lines:
                found[lines.most_common(1)[0][0]] += 1
        return dict(found)

    def add(self, path: str, line: SourceLine) -> None:
        """Record one opening."""
        self._lines[os.path.realpath(path)][line] += 1


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    if event != "open" or not _recorders:
        return
    path = arguments[0]
    if not isinstance(path, str | bytes):
        return
    frames: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < FRAMES:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    line = line_of(frames)
    if line is not None:
        for recorder in _recorders:
            recorder.add(os.fsdecode(path), line)


def _descriptors() -> dict[int, str]:
    found = {}
    try:
        for name in os.listdir("/proc/self/fd"):
            try:
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}").removesuffix(" (deleted)")
            except OSError:
                continue
    except OSError:
        return {}
    return found
