"""`CommunicationRecorder`: bandwidth of every collective while training, without a synchronisation.

Counts, groups and bytes come from torch's Flight Recorder, which also sees what C++ starts (DDP's reducer, functional
collectives). Durations come from NCCL's own events through the Flight Recorder, and on gloo from the futures of the
works that Python starts: a callback notes the time when the collective is done, and nothing waits. A callback costs
more than the rest, so only some calls of each size have one.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from piledriver.observe.communication.bandwidth import TimedCall, Traffic, collective_name, summarise_traffic
from piledriver.observe.communication.flight_recorder import flight_recorder_calls
from piledriver.observe.communication.sizes import collective_bytes
from piledriver.observe.torch_private import enable_collective_timing

_METHODS = (
    "allreduce", "allgather", "_allgather_base", "all_gather_single", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "broadcast", "alltoall", "alltoall_base", "all_to_all_single", "reduce", "gather",
    "scatter", "send", "recv", "barrier",
)  # fmt: skip
_IN_PLACE = frozenset({"allreduce", "broadcast", "reduce"})
_KEPT = 65_536


@dataclass(slots=True)
class RecordedCall:
    """One collective that Python started; times are nanoseconds of the Unix clock, 0 while it runs."""

    name: str
    group: str
    ranks: int
    size: int
    begin_ns: int
    end_ns: int = 0


class _Series:
    """The calls of one collective, group and size. Times lie in an array: objects would cost the garbage collector."""

    __slots__ = ("about", "starts", "timed")

    def __init__(self, name: str, group: str, ranks: int, size: int) -> None:
        self.about = (name, group, ranks, size)
        self.starts = array("q")
        self.timed: dict[int, RecordedCall] = {}

    def time(self, begin_ns: int) -> RecordedCall:
        """Return the record of a call whose end will be noted."""
        found = self.timed[begin_ns] = RecordedCall(*self.about, begin_ns)
        return found

    def shorten(self) -> None:
        """Forget the older half."""
        half = len(self.starts) // 2
        for begin in self.starts[:half]:
            self.timed.pop(begin, None)
        del self.starts[:half]

    def calls(self) -> Iterator[RecordedCall]:
        """Yield the calls that are kept."""
        for begin in self.starts[:]:
            yield self.timed.get(begin) or RecordedCall(*self.about, begin)


class CommunicationRecorder:
    """Records the collectives of a block, or of a whole run.

    >>> with CommunicationRecorder() as recorder:
    ...     pass
    >>> recorder.summary()
    []
    """

    def __init__(self, every: int = 64) -> None:
        """Time the first two calls of each collective and size, then one in `every`; all are counted."""
        self.begin_ns = 0
        self._every = every
        self._series: list[_Series] = []
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> CommunicationRecorder:
        self.begin_ns = time.time_ns()
        if not dist.is_available():
            return self
        for name in _METHODS:
            if name in vars(dist.ProcessGroup):
                # As the class holds it: what getattr returns would not bind to a group when it is put back.
                self._originals[name] = vars(dist.ProcessGroup)[name]
                setattr(dist.ProcessGroup, name, self._wrapped(name, getattr(dist.ProcessGroup, name)))
        if dist.is_initialized() and dist.get_backend() == "nccl":
            enable_collective_timing()
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)
        self._originals.clear()

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        kind, every, now = collective_name(name), self._every, time.time_ns
        known: dict[tuple[int, int], _Series] = {}
        in_place = name in _IN_PLACE

        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            begin = now()
            work = original(group, *args, **kwargs)
            first: Any = args[0] if args else None
            # Most calls are of one tensor, and searching through the arguments would cost more than the rest.
            single = in_place and type(first) is list and len(first) == 1
            size = first[0].nbytes if single else collective_bytes(args)
            series = known.get((id(group), size))
            if series is None:
                series = _Series(kind, group.group_desc or group.group_name, group.size(), size)
                known[id(group), size] = series
                self._series.append(series)
            starts = series.starts
            count = len(starts)
            starts.append(begin)
            if (count < 2 or not count % every) and work is not None and not (args and _on_device(args[0])):
                _when_done(work, series.time(begin))
            if count >= _KEPT:
                series.shorten()
            return work

        return call

    @property
    def calls(self) -> list[RecordedCall]:
        """The latest calls from Python, by their start."""
        found = (one for series in list(self._series) for one in series.calls())
        return sorted(found, key=lambda one: one.begin_ns)

    def summary(self, *, across_ranks: bool = False) -> list[Traffic]:
        """Return count, bytes and bandwidth by group, collective and size since the beginning, most bytes first.

        `across_ranks` adds the skew of arrivals; all ranks call it together, outside of the timed part.
        """
        calls = self.calls
        recorded = [one for one in calls if one.end_ns]
        durations: dict[tuple[str, int], list[float]] = defaultdict(list)
        for one in recorded:
            durations[one.name, one.size].append((one.end_ns - one.begin_ns) / 1e9)
        seen = flight_recorder_calls(self.begin_ns) if self._has_group() else []
        if not seen:
            seen = [TimedCall(one.name, one.group, one.ranks, one.size, None) for one in calls]
        timed = [
            replace(one, seconds=statistics.median(durations[one.name, one.size]))
            if one.seconds is None and (one.name, one.size) in durations
            else one
            for one in seen
        ]
        rows = summarise_traffic(timed)
        if across_ranks and self._has_group():
            self._add_skew(rows)
        return rows

    @staticmethod
    def _has_group() -> bool:
        return dist.is_available() and dist.is_initialized()

    def _add_skew(self, rows: list[Traffic]) -> None:
        """Exchange when each rank reached its collectives; the shortest duration of a call is its own."""
        mine: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        for one in self.calls:
            mine[one.name, one.size].append((one.begin_ns, one.end_ns))
        everything: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everything, dict(mine))
        for row in rows:
            ranks = [one[row.name, row.size] for one in everything if (row.name, row.size) in one]
            if len(ranks) < 2:
                continue
            same = list(zip(*ranks, strict=False))
            arrivals = [max(begin for begin, _ in calls) - min(begin for begin, _ in calls) for calls in same]
            row.skew_seconds = statistics.median(arrivals) / 1e9
            own = [min(end - begin for begin, end in calls) for calls in same if all(end for _, end in calls)]
            if own:
                row.seconds = statistics.median(own) / 1e9


def _on_device(value: Any) -> bool:
    tensor = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu"


def _when_done(work: Any, seen: RecordedCall) -> None:
    def note(_: Any) -> None:
        seen.end_ns = time.time_ns()

    try:
        work.get_future().add_done_callback(note)
    except RuntimeError:  # a work without a future, such as a receive on gloo
        return
