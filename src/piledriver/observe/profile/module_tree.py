"""The tree of modules: parameters, FLOPs, bytes and time of each, forward, backward and recomputed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from piledriver.observe.profile.wall import is_communication
from piledriver.observe.trace.attribution import MODULE, REGION, Attribution, Place
from piledriver.observe.trace.chrome import DeviceKernel, HostEvent, Trace
from piledriver.observe.trace.operators import (
    Boundaries,
    has_output_argument,
    matmul_precision,
    operator_bytes,
    operator_flops,
)

PHASES = ("forward", "backward", "recomputed")
_LONG_ENOUGH_S = 1e-3
"""Shorter work says little about rates."""


@dataclass(slots=True)
class Work:
    """What one kind of operator did in one place; times are of the device where there is one, else of the host."""

    operator: str
    place: Place
    calls: int = 0
    flops: int = 0
    bytes: int = 0
    seconds: float = 0.0
    kernels: int = 0
    precision: str | None = None


@dataclass(slots=True)
class ModuleRow:
    """One module with everything inside it."""

    path: str
    kind: str
    parameters: int
    flops: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    bytes: int = 0
    roofline_seconds: float = 0.0
    """The least time that the device's peak rates allow for these FLOPs and bytes."""

    @property
    def roofline_share(self) -> float:
        """The share of the roofline that the module reached; data in a cache may be read faster than from memory."""
        total = sum(self.seconds.values())
        return min(1.0, self.roofline_seconds / total) if total > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Roofline:
    """Peak rates of a device."""

    flops: Mapping[str, float]
    """FLOPs per second by type, as torch names it."""
    bandwidth: float
    """Bytes per second of its memory."""
    measured: bool = False
    """Whether the rates were measured, not taken from a datasheet."""

    def seconds(self, work: Work) -> float:
        """Return the least time for the FLOPs and bytes of some work."""
        peak = self.flops.get(work.precision or "float32") or max(self.flops.values(), default=0.0)
        return max(work.flops / peak if peak else 0.0, work.bytes / self.bandwidth if self.bandwidth else 0.0)

    def raised_by(self, work: Iterable[Work]) -> Roofline:
        """Return the roofline, with measured rates at least those of each module: a busy machine measures too little.

        Modules, not operators: FLOPs are counted for an operator, and its time may be that of operators that it calls.
        """
        if not self.measured:
            return self
        flops: Counter[Place] = Counter()
        seconds: defaultdict[Place, float] = defaultdict(float)
        for one in work:
            flops[one.place] += one.flops
            seconds[one.place] += one.seconds
        reached = max((flops[place] / took for place, took in seconds.items() if took >= _LONG_ENOUGH_S), default=0.0)
        return replace(self, flops={kind: max(rate, reached) for kind, rate in self.flops.items()})


def collect_work(
    trace: Trace,
    places: Attribution,
    window: tuple[float, float],
    unknown: Counter[str] | None = None,
    boundaries: Boundaries | None = None,
) -> list[Work]:
    """Return what every operator of a window did, by operator, module and phase.

    An operator that calls others is counted where torch has a FLOP formula for it, its time where it was spent.
    """
    found: dict[tuple[str, Place, str | None], Work] = {}
    given = _allocated(trace)
    for roots in trace.threads.values():
        stack: list[tuple[HostEvent, HostEvent | None]] = [(event, None) for event in roots]
        while stack:
            event, counted = stack.pop()
            if event.kind == "cpu_op" and window[0] <= event.start < window[1] and not _encloses(event):
                counted = _count(
                    event, counted, places, found, given, unknown, boundaries, on_device=bool(trace.kernels)
                )
            stack.extend((one, counted) for one in event.children)
    for kernel in trace.kernels:
        if window[0] <= kernel.start < window[1] and not kernel.is_communication:
            work = _entry(found, *_origin(kernel, places))
            work.seconds += (kernel.end - kernel.start) / 1e6
            work.kernels += 1
    return list(found.values())


def _count(
    event: HostEvent,
    counted: HostEvent | None,
    places: Attribution,
    found: dict[tuple[str, Place, str | None], Work],
    given: Mapping[int, int],
    unknown: Counter[str] | None,
    boundaries: Boundaries | None,
    *,
    on_device: bool,
) -> HostEvent | None:
    """Add one operator; return the operator whose FLOPs and bytes stand for everything inside it, if there is one."""
    if is_communication(event.name):
        return counted
    work = _entry(found, event.name, places.place(event), matmul_precision(event))
    work.calls += 1
    if not on_device:
        inside = sum(one.duration for one in event.children if one.kind == "cpu_op")
        work.seconds += max(0.0, event.duration - inside) / 1e6
    if counted is not None:
        return counted
    # A recomputation stops at the last operator that the backward needs, before that one computes anything.
    stopped = work.place.phase == "recomputed" and not given.get(id(event)) and not has_output_argument(event)
    flops = 0 if stopped else operator_flops(event, unknown, boundaries)
    work.flops += flops
    # An operator that only calls others moves what these move.
    if flops or not any(one.kind == "cpu_op" for one in event.children):
        work.bytes += operator_bytes(event, given.get(id(event), 0))
    return event if flops else None


def _encloses(event: HostEvent) -> bool:
    return event.name.startswith((MODULE, REGION, "autograd::engine", "enumerate("))


def _allocated(trace: Trace) -> dict[int, int]:
    """Return the bytes that each operator was given, itself or through the operators that it calls."""
    given: dict[int, int] = defaultdict(int)
    for one in trace.allocations:
        if one.size > 0 and one.event is not None:
            for event in one.event.ancestors():
                if event.kind == "cpu_op" and not _encloses(event):
                    given[id(event)] += one.size
    return given


def _origin(kernel: DeviceKernel, places: Attribution) -> tuple[str, Place, str | None]:
    """Return the operator that launched a kernel, its place and its type."""
    place = places.place(kernel.launch)
    if kernel.launch is not None:
        for event in kernel.launch.ancestors():
            if event.kind == "cpu_op" and not _encloses(event):
                return event.name, place, matmul_precision(event)
    return kernel.name, place, None


def _entry(
    found: dict[tuple[str, Place, str | None], Work], name: str, place: Place, precision: str | None = None
) -> Work:
    key = (name, place, precision)
    work = found.get(key)
    if work is None:
        work = found[key] = Work(name, place, precision=precision)
    return work


def module_tree(
    work: Iterable[Work], modules: Sequence[Mapping[str, Any]], roofline: Roofline | None
) -> list[ModuleRow]:
    """Return a row for each module, parents first, each with what its children did; then work outside all modules.

    `modules` are path, class and own parameters of each module, parents first.
    """
    rows = {str(one["path"]): ModuleRow(path=str(one["path"]), kind=str(one["class"]), parameters=0) for one in modules}
    for one in modules:
        for path in _with_parents(str(one["path"]), rows):
            rows[path].parameters += int(one["parameters"])
    outside: dict[str, ModuleRow] = {}
    for one_work in work:
        module, phase = one_work.place
        if phase in PHASES and module in rows:
            targets = [rows[path] for path in _with_parents(module, rows)]
            kept = phase
        else:
            name = f"({phase})" if phase not in PHASES else f"({phase}, outside modules)"
            targets, kept = [outside.setdefault(name, ModuleRow(path=name, kind="", parameters=0))], phase
            kept = phase if phase in PHASES else "forward"
        least = roofline.seconds(one_work) if roofline is not None else 0.0
        for row in targets:
            row.flops[kept] += one_work.flops
            row.seconds[kept] += one_work.seconds
            row.bytes += one_work.bytes
            row.roofline_seconds += least
    return [*rows.values(), *sorted(outside.values(), key=lambda row: -sum(row.seconds.values()))]


def _with_parents(path: str, rows: Mapping[str, ModuleRow]) -> list[str]:
    """Return a path and the paths of the modules around it."""
    parts = path.split(".")
    return [one for size in range(len(parts), 0, -1) if (one := ".".join(parts[:size])) in rows]
