"""LeakWatch: cheap counters after every few steps; where one grows steadily, some traced steps that name the line.

A look at the counters costs little, yet more than a loop should pay at every step. The first steps are looked at
densely. Later looks are rare, and the next ones dense again where a counter has grown in between, so that a leak is
named within fifty steps whenever it begins.

Counters only raise a suspicion. Then allocations are traced (`tracemalloc`) for twenty steps, with three counts of
what is alive. A leak is reported if the things made at one line grow in both intervals: warm-up, caches that fill and
fragmentation do not. Traced steps are slower, so that suspicions that come to nothing make the next one rarer.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from piledriver.observe.leaks.census import Census, live_bytes, live_tensors, take_census
from piledriver.observe.leaks.counters import BYTES_PER_STEP, Counters, Trend, device_bytes, grew, read_counters
from piledriver.observe.leaks.holders import callers, function_label, holder_of
from piledriver.observe.leaks.leak import Leak
from piledriver.observe.leaks.lines import FRAMES, SourceLine, made_at
from piledriver.observe.leaks.opened_files import OpenRecorder

_LOGGER = logging.getLogger(__name__)
# Steps between looks: during the first steps, later, and after a look that found growth.
_EARLY, _LATE, _ALERT = 4, 16, 2
_EARLY_STEPS = 128
# Steps after the start of tracing at which what is alive is counted.
_COUNTS = (3, 12, 21)
# On a CPU, freed memory of the process can absorb a leak for long, so that its size does not grow. The bytes of all
# live tensors are therefore compared at two steps, early and then ever more rarely: that visits every Python object.
_FIRST_WEIGHED, _SECOND_WEIGHED, _WEIGHED_STEPS = 8, 4096, 12
_LONGEST_TRACE_S = 120.0
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 1 << 20


class LeakWatch:
    """Watches a training loop: call `step` after every optimizer step, or `attach` it to the optimizer.

    A leak is passed to `report` as one line (default: a warning) and kept in `leaks`. A line is reported once.

    >>> watch = LeakWatch()
    >>> for _ in range(10):
    ...     watch.step()
    >>> watch.leaks
    []
    """

    def __init__(self, *, report: Callable[[str], Any] | None = None) -> None:
        self._report = report if report is not None else _LOGGER.warning
        self._steps = 0
        # Nothing is due before this step: what a step costs is this comparison.
        self._due = self._look_at = _EARLY
        self._trend = Trend()
        self._latest: Counters | None = None
        self._tracing: _Tracing | None = None
        self._pause = _FIRST_PAUSE
        self._weigh_at, self._weight = _FIRST_WEIGHED, 0
        self._known: set[tuple[str, SourceLine]] = set()
        self._handles: list[Any] = []
        self.leaks: list[Leak] = []
        """Leaks found so far."""

    def attach(self, optimizer: Any) -> LeakWatch:
        """Call `step` after every step of an optimizer, ours or torch's."""
        inner = getattr(optimizer, "optimizer", optimizer)
        self._handles.append(inner.register_step_post_hook(lambda *_: self.step()))
        return self

    def close(self) -> None:
        """Detach, and end a trace that is under way."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._tracing is not None:
            self._tracing.stop()
            self._tracing = None

    def __enter__(self) -> LeakWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self) -> None:
        """Look, if a look is due; never raises."""
        self._steps += 1
        if self._steps < self._due:
            return
        try:
            if self._tracing is not None:
                self._trace()
            else:
                self._look()
            self._due = self._steps + 1 if self._tracing is not None else min(self._look_at, self._next_weighing())
        except Exception as error:  # watching must not end a run
            _LOGGER.debug("leak watch: %s: %s", type(error).__name__, error)
            self._due = sys.maxsize
            self.close()

    def _look(self) -> None:
        suspects: set[str] = set()
        growth = self._weighed_growth() if self._steps >= self._next_weighing() else 0.0
        if growth >= BYTES_PER_STEP:
            suspects.add("tensors")
        if self._steps >= self._look_at:
            suspects |= self._suspects(read_counters(self._steps))
        if suspects:
            growth = max(growth, *(self._trend.per_step(name) for name in ("heap", "resident", "device")))
            self._tracing = _Tracing(self._steps, suspects, growth)

    def _suspects(self, now: Counters) -> set[str]:
        """Return the counters that grow steadily, and choose the next look."""
        before, self._latest = self._latest, now
        if self._steps > _EARLY_STEPS and not self._trend and not (before and grew(before, now)):
            self._look_at = self._steps + _LATE
            return set()
        self._trend.add(now)
        self._look_at = self._steps + (_EARLY if self._steps <= _EARLY_STEPS else _ALERT)
        suspects = self._trend.growing()
        if self._steps > _EARLY_STEPS and self._trend.is_full and not suspects:
            self._trend.clear()
            self._look_at = self._steps + _LATE
        return suspects

    def _next_weighing(self) -> int:
        return self._weigh_at if not self._weight else self._weigh_at + _WEIGHED_STEPS

    def _weighed_growth(self) -> float:
        """Add up the bytes of live tensors; return their growth per step at the second of two times."""
        if device_bytes():  # the device's allocator knows the bytes of its tensors
            self._weigh_at = max(_SECOND_WEIGHED, 16 * self._weigh_at)
            return 0.0
        if not self._weight:
            self._weight = max(1, live_bytes())
            return 0.0
        before, self._weight = self._weight, 0
        self._weigh_at = max(_SECOND_WEIGHED, 16 * self._weigh_at)
        return (live_bytes() - before) / _WEIGHED_STEPS

    def _trace(self) -> None:
        tracing = self._tracing
        assert tracing is not None
        if tracing.is_too_slow():
            tracing.stop()
            self._end_trace([])
            return
        if tracing.is_done(self._steps):
            self._end_trace(tracing.conclude(self._steps))

    def _end_trace(self, leaks: list[Leak]) -> None:
        self._tracing, self._latest, self._weight = None, None, 0
        self._trend.clear()
        found = [leak for leak in leaks if (leak.kind, leak.line) not in self._known]
        self._look_at = self._weigh_at = self._steps + self._pause
        self._pause = _FIRST_PAUSE if found else min(_LONGEST_PAUSE, 4 * self._pause)
        for leak in found:
            self._known.add((leak.kind, leak.line))
            self.leaks.append(leak)
            self._report(str(leak))


class _Tracing:
    """Some traced steps."""

    def __init__(self, step: int, suspects: set[str], memory_per_step: float) -> None:
        self._begun, self._suspects, self._memory_per_step = step, suspects, memory_per_step
        self._censuses: list[Census] = []
        self._started = not tracemalloc.is_tracing()
        if self._started:
            tracemalloc.start(FRAMES)
        self._files = OpenRecorder() if "files" in suspects else None
        if self._files is not None:
            self._files.start()
        self._threads = set(threading.enumerate())
        self._deadline = time.monotonic() + _LONGEST_TRACE_S

    def is_too_slow(self) -> bool:
        """Return whether tracing has lasted too long: long steps, or a validation among them."""
        return time.monotonic() > self._deadline and len(self._censuses) < 2

    @property
    def _memory(self) -> bool:
        return bool(self._suspects & {"heap", "resident", "device", "tensors"})

    def is_done(self, step: int) -> bool:
        """Count what is alive if that is due; return whether the last count was taken."""
        if step - self._begun not in _COUNTS:
            return False
        if self._memory:
            self._censuses.append(take_census())
        return step - self._begun == _COUNTS[-1]

    def stop(self) -> None:
        """Stop tracing."""
        if self._files is not None:
            self._files.stop()
            self._files = None
        if self._started:
            tracemalloc.stop()
            self._started = False

    def conclude(self, step: int) -> list[Leak]:
        """Return the leaks, and stop tracing."""
        try:
            found = self._file_leaks(step) + self._thread_leaks(step)
            if self._memory:
                found += self._memory_leaks(step)
        finally:
            self.stop()
        return found

    def _file_leaks(self, step: int) -> list[Leak]:
        if self._files is None:
            return []
        opened, self._files = self._files.stop(), None
        return [
            Leak("files", line, count / _COUNTS[-1], step)
            for line, count in opened.items()
            if count >= _COUNTS[-1] // 2
        ]

    def _thread_leaks(self, step: int) -> list[Leak]:
        if "threads" not in self._suspects:
            return []
        by_line: dict[SourceLine, list[threading.Thread]] = {}
        for thread in threading.enumerate():
            line = made_at(thread) if thread not in self._threads else None
            if line is not None:
                by_line.setdefault(line, []).append(thread)
        return [
            Leak("threads", line, len(threads) / _COUNTS[-1], step, f"thread {threads[0].name}")
            for line, threads in by_line.items()
            if len(threads) >= _COUNTS[-1] // 2
        ]

    def _memory_leaks(self, step: int) -> list[Leak]:
        first, middle, last = self._censuses
        nodes = min(middle.nodes - first.nodes, last.nodes - middle.nodes)
        if nodes >= _COUNTS[1] - _COUNTS[0] and last.roots:
            line = max(last.roots, key=lambda one: last.roots[one])
            return [self._tensor_leak("graph", line, self._memory_per_step, step)]
        grown = _grown([census.tensor_bytes for census in self._censuses])
        if grown:
            return [self._tensor_leak("tensors", line, per_step, step) for line, per_step in grown.items()]
        kept = _grown([census.python_bytes for census in self._censuses])
        return [Leak("host memory", line, per_step, step) for line, per_step in kept.items()]

    def _tensor_leak(self, kind: str, line: SourceLine, per_step: float, step: int) -> Leak:
        """Return the leak of what a line made: a hook's, if a function or a cycle keeps it alive."""
        held_by = _holder(line)
        if held_by.startswith("the function"):
            return Leak("hook", line, per_step, step, held_by)
        before = _count(line)
        gc.collect()
        if _count(line) < before / 2:
            return Leak("hook", line, per_step, step, held_by or "a reference cycle")
        return Leak(kind, line, per_step, step, held_by)


def _grown(counts: list[Mapping[SourceLine, int]]) -> dict[SourceLine, float]:
    """Return the growth per step of the lines whose bytes grew in both intervals, the largest first."""
    first, middle, last = counts
    found: dict[SourceLine, float] = {}
    for line, size in last.items():
        least = BYTES_PER_STEP * (_COUNTS[2] - _COUNTS[1])
        early, late = middle.get(line, 0) - first.get(line, 0), size - middle.get(line, 0)
        if early >= least / 2 and late >= least:
            found[line] = (early + late) / (_COUNTS[2] - _COUNTS[0])
    return dict(sorted(found.items(), key=lambda one: -one[1])[:3])


def _count(line: SourceLine) -> int:
    return sum(made_at(tensor) == line for tensor in live_tensors())


def _holder(line: SourceLine) -> str:
    """Return what holds one of the tensors that a line made, "" if that is not found."""
    candidates = [tensor for tensor in live_tensors() if made_at(tensor) == line]
    if not candidates:
        return ""
    for tensor in candidates:
        for hook in (getattr(tensor, "_backward_hooks", None) or {}).values():
            with suppress(AttributeError):
                return function_label(hook)
    # Of the tensors of a graph that one line made, the one that is kept is its end: a small one, perhaps the latest.
    least = min(tensor.numel() for tensor in candidates)
    small = [tensor for tensor in candidates if tensor.numel() == least]
    chosen = [*small[:2], *small[-2:]]
    del candidates, small
    while chosen:
        if found := holder_of(chosen.pop(), callers()):
            return found
    return ""
