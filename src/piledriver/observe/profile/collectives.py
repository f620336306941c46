"""Collectives of a trace: kind, group, size, type, duration, and which part was not hidden by compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from piledriver.observe.communication.bandwidth import collective_name, dtype_size
from piledriver.observe.communication.recorder import RecordedCall
from piledriver.observe.trace.chrome import Trace


@dataclass(slots=True)
class CollectiveCall:
    """One collective of one rank; times are microseconds after the trace's base."""

    name: str
    group: str
    ranks: int
    bytes: int
    start: float
    end: float


def traced_collectives(
    trace: Trace, window: tuple[float, float], recorded: Sequence[RecordedCall] = ()
) -> list[CollectiveCall]:
    """Return the collectives of a window in the order of their start.

    Kernels of NCCL carry their sizes. On gloo, calls from Python were recorded with their futures, and the trace has
    those that C++ started.
    """
    kernels = [one for one in trace.kernels if one.is_communication and window[0] <= one.start < window[1]]
    if kernels:
        return [_call(one.args, one.name, one.start, one.end) for one in kernels]
    found = [
        CollectiveCall(one.name, one.group, one.ranks, one.size, trace.time_of(one.begin_ns), trace.time_of(one.end_ns))
        for one in recorded
    ]
    known = list(found)
    for event in trace.collectives:
        call = _call(event.args, event.name, event.start, event.end)
        if not any(_same(call, one) for one in known):
            found.append(call)
    return sorted((one for one in found if window[0] <= one.start < window[1]), key=lambda one: one.start)


def _same(traced: CollectiveCall, recorded: CollectiveCall) -> bool:
    """Return whether the trace and the recorder saw the same call: its work runs inside the recorded time."""
    inside = recorded.start - 50 <= traced.start and traced.end <= recorded.end + 2000
    return traced.name == recorded.name and inside


def _call(args: Mapping[str, Any], name: str, start: float, end: float) -> CollectiveCall:
    kind = collective_name(str(args.get("Collective name") or name))
    elements = max(int(args.get("In msg nelems", 0) or 0), int(args.get("Out msg nelems", 0) or 0))
    size = elements * dtype_size(str(args.get("dtype", "")))
    if not size:
        size = _shapes(args)
    group = str(args.get("Process Group Description") or args.get("Process Group Name") or "")
    return CollectiveCall(kind, group, int(args.get("Group size", 0) or 0), size, start, end)


def _shapes(args: Mapping[str, Any]) -> int:
    """Return the bytes of the largest tensor in an event's recorded shapes."""
    largest = 0
    for dims, kind in zip(args.get("Input Dims", ()), args.get("Input type", ()), strict=False):
        count = 1
        if not isinstance(dims, list) or not dims or isinstance(dims[0], list):
            continue
        for size in dims:
            count *= int(size)
        largest = max(largest, count * dtype_size(str(kind)))
    return largest
