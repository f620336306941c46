"""Split the wall time of profiled steps into causes that sum to it.

On a device: compute is any time a kernel or a copy runs, exposed communication the time only collectives run; time
without either belongs to the loader, the checkpoint or the host, whichever kept the device waiting, and is idle where
work was queued but did not start. On a CPU, operators compute, and time without operators is the host's (Python) or,
where its thread was blocked, idle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from piledriver.observe.trace.attribution import Attribution
from piledriver.observe.trace.chrome import DeviceKernel, HostEvent, Trace
from piledriver.observe.trace.intervals import Intervals, intersect, length, subtract, union

CAUSES = ("compute", "exposed_communication", "host_wait", "loader", "checkpoint", "idle")
"""The causes of wall time, in the order of reports."""

_COMMUNICATION = ("c10d::", "_c10d_functional::", "record_param_comms", "gloo:", "nccl:", "mpi:")
# Events that enclose operators and Python code alike.
_CONTAINERS = ("module::", "region::", "enumerate(", "autograd::engine::evaluate_function")


@dataclass(slots=True)
class Wall:
    """Seconds of a rank's profiled window by cause."""

    total: float
    seconds: dict[str, float]
    kernels: dict[str, float] = field(default_factory=dict)
    """Seconds of the device by kind of kernel: compute, communication, copy, overlapped communication, none."""
    lanes: dict[str, Intervals] = field(default_factory=dict)
    """When each cause held, in microseconds of the trace."""


def split_wall(
    trace: Trace,
    places: Attribution,
    window: tuple[float, float],
    *,
    main_thread: int,
    blocked_us: float | None = None,
    collectives: Iterable[tuple[float, float]] = (),
) -> Wall:
    """Split a window of a trace.

    For a CPU, `blocked_us` is how long the main thread was not runnable, and `collectives` when collectives were under
    way.
    """
    loader, checkpoint = (
        _regions(trace, places, main_thread, "loader"),
        _regions(trace, places, main_thread, "checkpoint"),
    )
    whole: Intervals = [window]
    loader = intersect(whole, loader)
    checkpoint = subtract(intersect(whole, checkpoint), loader)
    if trace.kernels:
        lanes, kernels = _device(trace.kernels, whole, loader, checkpoint)
    else:
        lanes, kernels = _host(trace, whole, loader, checkpoint, blocked_us, collectives), {}
    seconds = {cause: length(lanes[cause]) / 1e6 for cause in CAUSES}
    return Wall((window[1] - window[0]) / 1e6, seconds, kernels, lanes)


def is_communication(name: str) -> bool:
    """Return whether a host event is part of a collective."""
    return name.startswith(_COMMUNICATION)


def _regions(trace: Trace, places: Attribution, thread: int, phase: str) -> Intervals:
    """Return when the main thread was in a region; other threads' regions run beside the step."""
    found = []
    stack = list(trace.threads.get(thread, ()))
    while stack:
        event = stack.pop()
        if places.place(event).phase == phase:
            found.append((event.start, event.end))
        else:
            stack.extend(event.children)
    return union(found)


def _device(
    kernels: list[DeviceKernel], whole: Intervals, loader: Intervals, checkpoint: Intervals
) -> tuple[dict[str, Intervals], dict[str, float]]:
    computed = intersect(whole, union((one.start, one.end) for one in kernels if _kind(one) == "compute"))
    copied = intersect(whole, union((one.start, one.end) for one in kernels if _kind(one) == "copy"))
    sent = intersect(whole, union((one.start, one.end) for one in kernels if _kind(one) == "communication"))
    compute = union([*computed, *copied])
    exposed = subtract(sent, compute)
    rest = subtract(subtract(whole, compute), exposed)
    queued = _queued(kernels, rest)
    waiting = subtract(rest, queued)
    waits_loader = intersect(waiting, loader)
    waits_checkpoint = subtract(intersect(waiting, checkpoint), waits_loader)
    lanes = {
        "compute": compute,
        "exposed_communication": exposed,
        "loader": waits_loader,
        "checkpoint": waits_checkpoint,
        "host_wait": subtract(subtract(waiting, waits_loader), waits_checkpoint),
        "idle": queued,
    }
    by_kind = {
        "compute": length(computed) / 1e6,
        "copy": length(subtract(copied, computed)) / 1e6,
        "communication": length(sent) / 1e6,
        "overlapped_communication": length(intersect(sent, computed)) / 1e6,
        "none": length(rest) / 1e6,
    }
    return lanes, by_kind


def _kind(kernel: DeviceKernel) -> str:
    if kernel.is_communication:
        return "communication"
    return "compute" if kernel.kind == "kernel" else "copy"


def _queued(kernels: list[DeviceKernel], gaps: Intervals) -> Intervals:
    """Return the time of gaps in which the next kernel had been launched: the device waited, but not for the host."""
    starts = [one.start for one in kernels]
    found = []
    for start, end in gaps:
        position = bisect_right(starts, end - 1e-3)
        following = kernels[position] if position < len(kernels) else None
        if following is None or following.start > end + 1e-3:
            continue  # nothing follows: the end of the window
        launched = start if following.launch is None else max(start, following.launch.start)
        if launched < end:
            found.append((launched, end))
    return found


def _host(
    trace: Trace,
    whole: Intervals,
    loader: Intervals,
    checkpoint: Intervals,
    blocked_us: float | None,
    collectives: Iterable[tuple[float, float]],
) -> dict[str, Intervals]:
    working: list[tuple[float, float]] = []
    sent = list(collectives)
    for roots in trace.threads.values():
        operators, nested = _work(roots)
        working += subtract(operators, nested)
        sent += nested
    outside = subtract(subtract(whole, loader), checkpoint)
    compute = intersect(outside, union(working))
    exposed = subtract(intersect(outside, union(sent)), compute)
    rest = subtract(subtract(outside, compute), exposed)
    idle = 0.0
    if blocked_us is not None:
        # Waiting in the loader, the checkpoint or a collective is blocked time as well, and counted there.
        idle = min(length(rest), max(0.0, blocked_us - length(loader) - length(checkpoint) - length(exposed)))
    host, blocked = _divide(rest, idle)
    return {
        "compute": compute,
        "exposed_communication": exposed,
        "loader": loader,
        "checkpoint": checkpoint,
        "host_wait": host,
        "idle": blocked,
    }


def _work(roots: Iterable[HostEvent]) -> tuple[Intervals, Intervals]:
    """Return when a thread ran operators, and when a collective inside or outside of them."""
    operators, nested = [], []
    stack = [(event, False) for event in roots]
    while stack:
        event, inside = stack.pop()
        if is_communication(event.name):
            nested.append((event.start, event.end))
            continue
        works = event.kind == "cpu_op" and not event.name.startswith(_CONTAINERS)
        if works and not inside:
            operators.append((event.start, event.end))
        stack.extend((one, inside or works) for one in event.children)
    return union(operators), union(nested)


def _divide(rest: Intervals, idle: float) -> tuple[Intervals, Intervals]:
    """Give the longest gaps to idle time until it is used up: a thread that sleeps does so in one piece."""
    blocked: list[tuple[float, float]] = []
    for start, end in sorted(rest, key=lambda one: one[0] - one[1]):
        taken = min(end - start, idle)
        if taken <= 0:
            break
        blocked.append((start, start + taken))
        idle -= taken
    found = union(blocked)
    return subtract(rest, found), found
