"""Time the parts of a step without a device synchronisation.

On CUDA a duration is measured by a pair of events, read after the GPU has passed them; elsewhere by the host clock.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_KEPT = 1000


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of one part, in seconds."""

    count: int
    mean_s: float
    median_s: float
    largest_s: float


class StepTimer:
    """Durations by name; the latest thousand of each are kept.

    >>> timer = StepTimer("cpu")
    >>> with timer("forward"):
    ...     pass
    >>> timer.timings()["forward"].count
    1
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = torch.device(device) if device is not None else _default_device()
        self._done: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._running: dict[str, deque[tuple[Any, Any]]] = defaultdict(deque)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block under a name. A block that raises is not counted."""
        stop = self._start(name)
        yield
        stop()

    def timings(self) -> dict[str, Timing]:
        """Return the durations so far, without waiting: the latest GPU blocks may be missing."""
        for name, pairs in self._running.items():
            while pairs and pairs[0][1].query():
                begin, end = pairs.popleft()
                self._done[name].append(begin.elapsed_time(end) / 1000)
        return {
            name: Timing(len(found), statistics.fmean(found), statistics.median(found), max(found))
            for name, found in self._done.items()
            if found
        }

    def _start(self, name: str) -> Callable[[], None]:
        if self._device.type != "cuda":
            begin_s = time.perf_counter()
            return lambda: self._done[name].append(time.perf_counter() - begin_s)
        stream = torch.cuda.current_stream(self._device)
        event: Any = torch.cuda.Event
        begin = event(enable_timing=True)
        begin.record(stream)

        def stop() -> None:
            end = event(enable_timing=True)
            end.record(stream)
            self._running[name].append((begin, end))

        return stop


def _default_device() -> torch.device:
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
