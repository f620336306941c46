"""Time the parts of a step without a device synchronisation.

On CUDA a duration is measured by a pair of events, read after the GPU has passed them; elsewhere by the host clock.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

_KEPT = 1000
# Pairs of events that wait to be read. Reading asks the driver, so that it is done for several at once.
_UNREAD = 64


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
        self._on_device = self._device.type == "cuda"
        self._done: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._running: dict[str, deque[tuple[Any, Any]]] = defaultdict(deque)
        self._idle_events: list[Any] = []

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Return a context that times its block under a name. A block that raises is not counted."""
        return _DeviceBlock(self, name) if self._on_device else _HostBlock(self._done[name])

    def timings(self) -> dict[str, Timing]:
        """Return the durations so far, without waiting: the latest GPU blocks may be missing."""
        for name in list(self._running):
            self._read(name)
        return {
            name: Timing(len(found), statistics.fmean(found), statistics.median(found), max(found))
            for name, found in self._done.items()
            if found
        }

    def _record(self) -> Any:
        """Return an event at the present place of the device's stream; events are used again once they were read."""
        make: Any = torch.cuda.Event
        event = self._idle_events.pop() if self._idle_events else make(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _add(self, name: str, begin: Any, end: Any) -> None:
        pairs = self._running[name]
        pairs.append((begin, end))
        if len(pairs) > _UNREAD:
            self._read(name)

    def _read(self, name: str) -> None:
        """Read the pairs of events that the device has passed."""
        pairs, done = self._running[name], self._done[name]
        while pairs and pairs[0][1].query():
            begin, end = pairs.popleft()
            done.append(begin.elapsed_time(end) / 1000)
            self._idle_events += (begin, end)


class _HostBlock(AbstractContextManager[None]):
    """A block timed by the host's clock; a generator would cost several times as much."""

    __slots__ = ("_begin_s", "_done")

    def __init__(self, done: deque[float]) -> None:
        self._done = done

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._done.append(time.perf_counter() - self._begin_s)


class _DeviceBlock(AbstractContextManager[None]):
    """A block timed by a pair of events."""

    __slots__ = ("_begin", "_name", "_timer")

    def __init__(self, timer: StepTimer, name: str) -> None:
        self._timer, self._name = timer, name

    def __enter__(self) -> None:
        self._begin = self._timer._record()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._timer._add(self._name, self._begin, self._timer._record())


def _default_device() -> torch.device:
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
