"""`CommunicationRecorder`: bandwidth of every collective while training, without a synchronisation.

Counts, groups and bytes come from torch's Flight Recorder, which also sees what C++ starts (DDP's reducer, functional
collectives). Durations come from NCCL's own events through the Flight Recorder, and on gloo from the futures of the
works that Python starts: a callback notes the time when the collective is done, and nothing waits.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
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
_KEPT = 200_000


@dataclass(slots=True)
class RecordedCall:
    """One collective that Python started; times are nanoseconds of the Unix clock, 0 while it runs."""

    name: str
    group: str
    ranks: int
    size: int
    begin_ns: int
    end_ns: int = 0


class CommunicationRecorder:
    """Records the collectives of a block, or of a whole run.

    >>> with CommunicationRecorder() as recorder:
    ...     pass
    >>> recorder.summary()
    []
    """

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.begin_ns = 0
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
        kind, calls = collective_name(name), self.calls

        @functools.wraps(original)
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            begin = time.time_ns()
            work = original(group, *args, **kwargs)
            if torch.compiler.is_compiling() or len(calls) >= _KEPT:
                return work
            seen = RecordedCall(kind, group.group_desc or group.group_name, group.size(), collective_bytes(args), begin)
            calls.append(seen)
            if work is not None and not (args and _on_device(args[0])):
                _when_done(work, seen)
            return work

        return call

    def summary(self, *, across_ranks: bool = False) -> list[Traffic]:
        """Return count, bytes and bandwidth by group, collective and size since the beginning, most bytes first.

        `across_ranks` adds the skew of arrivals; all ranks call it together, outside of the timed part.
        """
        recorded = [one for one in self.calls if one.end_ns]
        durations: dict[tuple[str, int], list[float]] = defaultdict(list)
        for one in recorded:
            durations[one.name, one.size].append((one.end_ns - one.begin_ns) / 1e9)
        seen = flight_recorder_calls(self.begin_ns) if self._has_group() else []
        if not seen:
            seen = [TimedCall(one.name, one.group, one.ranks, one.size, None) for one in self.calls]
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
        for one in list(self.calls):
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
