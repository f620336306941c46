"""`CommunicationRecorder`: bandwidth of every collective while training, without a synchronisation.

Counts, groups, bytes and arrivals come from torch's Flight Recorder, which sees what C++ starts as well (DDP's reducer,
functional collectives) and costs nothing more. Durations come from NCCL's own events through the Flight Recorder. On
gloo they come from the futures of some works: a callback notes when the collective is done, and nothing waits. Python
looks at a few calls in a row and then at none for some seconds, because looking at each would cost the most.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from piledriver.observe.communication.bandwidth import TimedCall, Traffic, summarise_traffic
from piledriver.observe.communication.flight_recorder import enqueued_collectives, flight_recorder_calls
from piledriver.observe.communication.interception import ignore, listen
from piledriver.observe.torch_private import enable_collective_timing

_LOOKED_AT = 32
"""Calls in a row that Python looks at."""
_KEPT = 8192
# Without a Flight Recorder Python counts every call; noting the end of one costs more, so that only some are timed.
_TIMED_ONE_IN = 64

Kind = tuple[str, int]
"""Name and bytes of a collective."""


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

    def __init__(self, every_s: float = 10.0) -> None:
        """Time some collectives in a row every so many seconds, all of them with 0."""
        self.begin_ns = 0
        self._every_s = every_s
        self._calls: deque[RecordedCall] = deque(maxlen=_KEPT)
        self._counts: Counter[tuple[str, str, int, int]] = Counter()
        self._enqueued: dict[str, int] = {}
        self._left, self._counts_all = _LOOKED_AT, not every_s
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> CommunicationRecorder:
        self.begin_ns = time.time_ns()
        self._enqueued = enqueued_collectives() if _has_group() else {}
        self._left = _LOOKED_AT
        listen(self)
        if _has_group() and dist.get_backend() == "nccl":
            enable_collective_timing()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None
        self._stop.clear()
        ignore(self)

    def hear(self, name: str, group: Any, size: int, begin_ns: int, work: Any, args: tuple[Any, ...]) -> None:
        """Take note of a collective; called while the recorder listens."""
        call = RecordedCall(name, group.group_desc or group.group_name, group.size(), size, begin_ns)
        self._calls.append(call)
        about = (name, call.group, call.ranks, size)
        self._counts[about] += 1
        timed = not self._every_s or not self._counts_all or self._counts[about] % _TIMED_ONE_IN < 3
        if timed and work is not None and not (args and _on_device(args[0])):
            _when_done(work, call)
        self._left -= 1
        if not self._left and not self._counts_all:
            self._rest()

    def _rest(self) -> None:
        """Stop looking for some seconds, if the Flight Recorder counts the collectives of this process."""
        if enqueued_collectives() == self._enqueued:
            self._counts_all = True
            return
        ignore(self)
        if self._thread is None:
            # A weak reference: a recorder that is collected without `__exit__` ends its thread.
            arguments = (weakref.ref(self), self._stop, self._every_s)
            self._thread = threading.Thread(target=_look_again, args=arguments, name="collectives", daemon=True)
            self._thread.start()

    def look(self) -> None:
        """Look at the next few collectives."""
        self._left = _LOOKED_AT
        listen(self)

    @property
    def calls(self) -> list[RecordedCall]:
        """The latest calls from Python that were looked at, by their start."""
        return sorted(self._calls.copy(), key=lambda one: one.begin_ns)

    def summary(self, *, across_ranks: bool = False) -> list[Traffic]:
        """Return count, bytes and bandwidth by group, collective and size since the beginning, most bytes first.

        Counts are exact up to the length of the Flight Recorder (2,000 calls); beyond it they are those of the latest
        calls, scaled to the number of collectives that the group has started. `across_ranks` adds the skew of
        arrivals; all ranks call it together, outside of the timed part.
        """
        seen = flight_recorder_calls(self.begin_ns) if _has_group() else []
        if not seen:
            seen = self._seen_by_python()
            totals = dict(self._counts)
        else:
            totals = self._extrapolated(seen)
        durations: dict[Kind, list[float]] = defaultdict(list)
        for one in self.calls:
            if one.end_ns:
                durations[one.name, one.size].append((one.end_ns - one.begin_ns) / 1e9)
        typical = {kind: statistics.median(found) for kind, found in durations.items()}
        rows = summarise_traffic(
            replace(one, seconds=typical.get((one.name, one.size))) if one.seconds is None else one for one in seen
        )
        for row in rows:
            row.count = totals.get((row.name, row.group, row.ranks, row.size), row.count)
        if across_ranks and _has_group():
            self._add_skew(rows, seen)
        return rows

    def _seen_by_python(self) -> list[TimedCall]:
        numbers: Counter[Kind] = Counter()
        found = []
        for one in self.calls:
            numbers[one.name, one.size] += 1
            sequence = f"{one.name}/{one.size}", numbers[one.name, one.size]
            found.append(TimedCall(one.name, one.group, one.ranks, one.size, None, sequence, arrived_ns=one.begin_ns))
        return found

    def _extrapolated(self, seen: Sequence[TimedCall]) -> dict[tuple[str, str, int, int], int]:
        kept = Counter(one.group_id for one in seen)
        now = enqueued_collectives()
        started = {group: now.get(group, 0) - self._enqueued.get(group, 0) for group in kept}
        found: Counter[tuple[str, str, int, int]] = Counter()
        of_group: dict[tuple[str, str, int, int], str] = {}
        for one in seen:
            about = (one.name, one.group, one.ranks, one.size)
            found[about] += 1
            of_group[about] = one.group_id
        return {
            about: round(count * max(1.0, started[of_group[about]] / kept[of_group[about]]))
            for about, count in found.items()
        }

    def _add_skew(self, rows: list[Traffic], seen: Sequence[TimedCall]) -> None:
        """Exchange when each rank reached its collectives; the shortest duration of a call is its own."""
        mine = (
            [(one.name, one.size, one.sequence, one.arrived_ns) for one in seen],
            self._durations_by_sequence(seen),
        )
        everything: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everything, mine)
        arrivals: dict[tuple[Kind, tuple[str, int]], list[int]] = defaultdict(list)
        durations: dict[tuple[Kind, tuple[str, int]], list[int]] = defaultdict(list)
        for reached, timed in everything:
            for name, size, sequence, arrived_ns in reached:
                arrivals[(name, size), sequence].append(arrived_ns)
            for name, size, sequence, duration_ns in timed:
                durations[(name, size), sequence].append(duration_ns)
        for row in rows:
            kind = row.name, row.size
            several = {key: found for key, found in arrivals.items() if key[0] == kind and len(found) > 1}
            if not several:
                continue
            row.skew_seconds = statistics.median(max(found) - min(found) for found in several.values()) / 1e9
            own = [min(durations[key]) for key, found in several.items() if len(durations.get(key, ())) == len(found)]
            if own:
                row.seconds = statistics.median(own) / 1e9

    def _durations_by_sequence(self, seen: Sequence[TimedCall]) -> list[tuple[str, int, tuple[str, int], int]]:
        """Return the durations that Python noted, each with the sequence number of its call."""
        by_kind: dict[Kind, list[TimedCall]] = defaultdict(list)
        for one in seen:
            by_kind[one.name, one.size].append(one)
        found = []
        for call in self.calls:
            entries = by_kind.get((call.name, call.size), [])
            # The Flight Recorder notes a call after it was begun.
            place = bisect_left(entries, call.begin_ns, key=lambda one: one.arrived_ns)
            if call.end_ns and place < len(entries):
                found.append((call.name, call.size, entries[place].sequence, call.end_ns - call.begin_ns))
        return found


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _look_again(held: weakref.ref[CommunicationRecorder], stop: threading.Event, every_s: float) -> None:
    # At multiples of the interval: ranks with the same clock look at the same calls.
    while not stop.wait(every_s - time.time() % every_s):
        recorder = held()
        if recorder is None:
            return
        recorder.look()
        del recorder


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
