"""Read a chrome trace of torch's profiler into nested host events, device kernels and allocations.

Times are in microseconds after `Trace.base_ns`, a time of the Unix clock: a float of the Unix clock itself would lose
the nanoseconds.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_HOST = frozenset({"cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver"})
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver"})
_COLLECTIVE = ("gloo:", "nccl:", "mpi:")


@dataclass(slots=True, eq=False)
class HostEvent:
    """One operator, annotation or call of the CUDA runtime, on a thread of the host."""

    name: str
    kind: str
    start: float
    end: float
    thread: int
    args: Mapping[str, Any]
    parent: HostEvent | None = None
    children: list[HostEvent] = field(default_factory=list)
    forward: HostEvent | None = None
    """For a function of the backward: the operator of the forward that recorded it."""

    @property
    def duration(self) -> float:
        """Microseconds from start to end."""
        return self.end - self.start

    def ancestors(self) -> Iterator[HostEvent]:
        """Yield this event and all that enclose it, innermost first."""
        event: HostEvent | None = self
        while event is not None:
            yield event
            event = event.parent


@dataclass(slots=True, eq=False)
class DeviceKernel:
    """One kernel or copy on a device."""

    name: str
    kind: str
    start: float
    end: float
    stream: int
    args: Mapping[str, Any]
    launch: HostEvent | None = None

    @property
    def is_communication(self) -> bool:
        """Whether this is a collective of NCCL."""
        return self.name.startswith(("ncclKernel", "ncclDevKernel")) or "nccl" in self.name[:12].lower()


@dataclass(slots=True)
class Allocation:
    """One allocation (positive) or release (negative) of an allocator."""

    time: float
    address: int
    size: int
    thread: int
    device: int
    """-1 on the host."""
    allocated: int
    reserved: int
    event: HostEvent | None = None
    """The innermost host event around it."""


@dataclass(slots=True)
class Trace:
    """Events of one rank."""

    threads: dict[int, list[HostEvent]]
    """Outermost events of each thread, by start."""
    kernels: list[DeviceKernel]
    allocations: list[Allocation]
    collectives: list[HostEvent]
    """Asynchronous collectives of the host (gloo), which belong to no thread's nesting."""
    base_ns: int

    def time_of(self, unix_ns: int) -> float:
        """Return a time of the Unix clock on this trace's axis."""
        return (unix_ns - self.base_ns) / 1000

    def host_events(self) -> Iterator[HostEvent]:
        """Yield every host event, parents before children."""
        for roots in self.threads.values():
            yield from _ordered(roots)


def read_trace(path: str) -> Trace:
    """Read a trace file, plain or gzipped."""
    with gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else open(path, encoding="utf-8") as file:
        return parse_trace(json.load(file))


def parse_trace(raw: Mapping[str, Any]) -> Trace:
    """Return the events of a chrome trace as `torch.profiler` writes it."""
    # Old traces count from 1970, where a float has no nanoseconds: count from the first event instead.
    origin = int(min((event["ts"] for event in raw["traceEvents"] if "ts" in event), default=0))
    by_thread: dict[int, list[HostEvent]] = defaultdict(list)
    kernels: list[DeviceKernel] = []
    allocations: list[Allocation] = []
    collectives: list[HostEvent] = []
    flows: dict[str, dict[Any, tuple[int, float]]] = {"s": {}, "f": {}}
    for event in raw["traceEvents"]:
        phase, kind = event.get("ph"), event.get("cat")
        if phase == "X" and kind in _HOST:
            start = event["ts"] - origin
            end = start + event.get("dur", 0.0)
            made = HostEvent(event["name"], kind, start, end, _number(event["tid"]), event.get("args", {}))
            if made.name.startswith(_COLLECTIVE):
                collectives.append(made)
            elif kind != "python_function":
                by_thread[made.thread].append(made)
        elif phase == "X" and kind in _DEVICE:
            start = event["ts"] - origin
            args = event.get("args", {})
            stream = _number(args.get("stream", event.get("tid", 0)))
            kernels.append(DeviceKernel(event["name"], kind, start, start + event.get("dur", 0.0), stream, args))
        elif phase == "i" and event.get("name") == "[memory]":
            allocations.append(_allocation(event, origin))
        elif kind == "fwdbwd" and phase in flows:
            flows[phase][event["id"]] = (_number(event["tid"]), event["ts"] - origin)
    threads = {thread: _nest(events) for thread, events in by_thread.items()}
    kernels.sort(key=lambda one: one.start)
    allocations.sort(key=lambda one: one.time)
    base_ns = int(raw.get("baseTimeNanoseconds", 0)) + origin * 1000
    trace = Trace(threads, kernels, allocations, collectives, base_ns)
    _link_launches(by_thread, kernels)
    _link_backward(by_thread, flows["s"], flows["f"])
    _place(trace)
    return trace


def _number(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return -1


def _allocation(event: Mapping[str, Any], origin: int) -> Allocation:
    args = event["args"]
    device = int(args.get("Device Id", -1)) if int(args.get("Device Type", 0)) != 0 else -1
    return Allocation(
        time=event["ts"] - origin,
        address=int(args.get("Addr", 0)),
        size=int(args.get("Bytes", 0)),
        thread=_number(event["tid"]),
        device=device,
        allocated=int(args.get("Total Allocated", 0)),
        reserved=int(args.get("Total Reserved", 0)),
    )


def _nest(events: list[HostEvent]) -> list[HostEvent]:
    """Set parents and children by time; return the outermost events. An event that overlaps another is its sibling."""
    events.sort(key=lambda one: (one.start, -one.end))
    roots: list[HostEvent] = []
    stack: list[HostEvent] = []
    for event in events:
        while stack and (event.start >= stack[-1].end or event.end > stack[-1].end):
            stack.pop()
        if stack:
            event.parent = stack[-1]
            stack[-1].children.append(event)
        else:
            roots.append(event)
        stack.append(event)
    return roots


def _link_launches(by_thread: Mapping[int, list[HostEvent]], kernels: list[DeviceKernel]) -> None:
    launches = {
        event.args["correlation"]: event
        for events in by_thread.values()
        for event in events
        if event.kind in _RUNTIME and "correlation" in event.args
    }
    for kernel in kernels:
        kernel.launch = launches.get(kernel.args.get("correlation"))


def _link_backward(
    by_thread: Mapping[int, list[HostEvent]],
    starts: Mapping[Any, tuple[int, float]],
    ends: Mapping[Any, tuple[int, float]],
) -> None:
    """Join each function of the backward with the operator of the forward that recorded it, by the trace's flows."""
    if not starts:
        return
    at = {
        (event.thread, round(event.start * 1000)): event
        for events in by_thread.values()
        for event in events
        if event.kind == "cpu_op"
    }
    for key, (thread, time) in ends.items():
        begin = starts.get(key)
        later = at.get((thread, round(time * 1000)))
        if begin is not None and later is not None:
            later.forward = at.get((begin[0], round(begin[1] * 1000)))


def _place(trace: Trace) -> None:
    """Find the innermost host event around each allocation."""
    by_thread: dict[int, list[Allocation]] = defaultdict(list)
    for one in trace.allocations:
        by_thread[one.thread].append(one)
    for thread, found in by_thread.items():
        events = list(_ordered(trace.threads.get(thread, [])))
        stack: list[HostEvent] = []
        position = 0
        for one in found:
            while position < len(events) and events[position].start <= one.time:
                event = events[position]
                while stack and stack[-1] is not event.parent:
                    stack.pop()
                stack.append(event)
                position += 1
            while stack and stack[-1].end < one.time:
                stack.pop()
            one.event = stack[-1] if stack else None


def _ordered(roots: list[HostEvent]) -> Iterator[HostEvent]:
    stack = list(reversed(roots))
    while stack:
        event = stack.pop()
        yield event
        stack.extend(reversed(event.children))
