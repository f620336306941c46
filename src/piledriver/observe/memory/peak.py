"""Name every byte that is allocated at the peak of profiled steps.

The trace holds each allocation with the operator, module and phase that made it. Storages of parameters, gradients and
optimizer states are recognised by their addresses, taken while they are alive; an allocation that a step's operator
makes and releases itself is workspace; what remains from a forward is an activation of its module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from piledriver.observe.memory.census import Storage
from piledriver.observe.trace.attribution import ROOT, Attribution
from piledriver.observe.trace.chrome import Allocation, HostEvent, Trace

UNNAMED = "unnamed"
_ROUND = 512  # the CUDA allocator's smallest unit


@dataclass(slots=True)
class MemoryOwner:
    """Bytes at the peak that belong to one category and name."""

    category: str
    name: str
    bytes: int
    count: int = 1


@dataclass(slots=True)
class PeakMemory:
    """The largest total of allocated bytes on one device, and whose they were."""

    device: str
    bytes: int
    reserved: int
    """Bytes that the allocator held from the device; 0 on the host."""
    where: str
    """Module and phase of the allocation that reached the peak."""
    owners: list[MemoryOwner] = field(default_factory=list)
    capacity: int = 0
    """Memory of the device; 0 if unknown."""

    @property
    def named_share(self) -> float:
        """The share of the allocated bytes that have an owner."""
        missing = sum(one.bytes for one in self.owners if one.category == UNNAMED)
        return 1.0 - missing / self.bytes if self.bytes else 1.0

    @property
    def fragmentation(self) -> int:
        """Reserved bytes that no tensor uses."""
        return max(0, self.reserved - self.bytes)

    def by_category(self) -> dict[str, int]:
        """Return bytes by category, largest first."""
        found: dict[str, int] = defaultdict(int)
        for one in self.owners:
            found[one.category] += one.bytes
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))


@dataclass(slots=True)
class _Live:
    address: int
    size: int
    born: float
    event: HostEvent | None
    base: Storage | None = None
    ended: float = float("inf")
    died_in: HostEvent | None = None


@dataclass(frozen=True, slots=True)
class StorageSighting:
    """Storages as a census found them at a time of the trace."""

    time: float
    storages: Sequence[Storage]


def peak_memory(
    trace: Trace,
    places: Attribution,
    sightings: Sequence[StorageSighting],
    *,
    device: int = -1,
    allocated_before: int | None = None,
    reserved: int = 0,
    capacity: int = 0,
    released: Mapping[int, float] | None = None,
) -> PeakMemory:
    """Return the peak of one device. The first sighting is the state before the trace.

    `released` says when storages of the host that were there before ended, by address: a trace of the host does not.
    `allocated_before` is what the allocator counted there; bytes beyond the sighting's have no name.
    """
    lives, start = _replay(trace.allocations, sightings, device)
    for one in lives:
        if one.base is not None and device < 0:
            one.ended = min(one.ended, (released or {}).get(one.address, float("inf")))
    known = sum(one.size for one in lives if one.base is not None)
    unnamed = max(0, (allocated_before or 0) - known)
    size, highest, at = known + unnamed, known + unnamed, start
    marks: list[tuple[float, int, _Live]] = []
    for one in lives:
        if one.base is None:
            marks.append((one.born, one.size, one))
        if one.ended != float("inf"):
            marks.append((one.ended, -one.size, one))
    top: _Live | None = None
    for time, change, one in sorted(marks, key=lambda mark: (mark[0], mark[1])):
        size += change
        if size > highest:
            highest, at, top = size, time, one
    labels = _kept_labels(lives, trace, places) | _labels(lives, sightings)
    found: dict[tuple[str, str], MemoryOwner] = {}
    for one in lives:
        if one.born <= at < one.ended or one is top:
            category, name = labels.get(id(one)) or _role(one, places)
            owner = found.setdefault((category, name), MemoryOwner(category, name, 0, 0))
            owner.bytes += one.size
            owner.count += 1
    if unnamed:
        found[UNNAMED, ""] = MemoryOwner(UNNAMED, "allocated before the profile", unnamed)
    where = _where(top, places)
    name = "cpu" if device < 0 else f"cuda:{device}"
    owners = sorted(found.values(), key=lambda owner: -owner.bytes)
    held = max([reserved, *(one.reserved for one in trace.allocations if one.device == device and one.time <= at)])
    return PeakMemory(name, highest, held if device >= 0 else 0, where, owners, capacity)


def _replay(
    allocations: Iterable[Allocation], sightings: Sequence[StorageSighting], device: int
) -> tuple[list[_Live], float]:
    """Return every allocation of a device with its life, those before the trace first."""
    first = sightings[0] if sightings else StorageSighting(float("-inf"), ())
    lives: list[_Live] = []
    at: dict[int, _Live] = {}
    for storage in first.storages:
        if _same(storage.device, device):
            size = storage.size if device < 0 else -(-storage.size // _ROUND) * _ROUND
            at[storage.address] = _Live(storage.address, size, float("-inf"), None, base=storage)
            lives.append(at[storage.address])
    for one in allocations:
        if one.device != device:
            continue
        if one.size > 0:
            at[one.address] = _Live(one.address, one.size, one.time, one.event)
            lives.append(at[one.address])
        elif one.address in at:
            ended = at.pop(one.address)
            ended.ended, ended.died_in = one.time, one.event
            if ended.base is not None:
                ended.size = -one.size
    return lives, first.time


def _labels(lives: Sequence[_Live], sightings: Sequence[StorageSighting]) -> dict[int, tuple[str, str]]:
    """Return category and name of allocations that a census recognised, by the address at its time."""
    found: dict[int, tuple[str, str]] = {}
    for one in lives:
        if one.base is not None:
            found[id(one)] = (one.base.category, one.base.name)
    for sighting in sightings[1:]:
        by_address = {one.address: one for one in lives if one.base is None and one.born <= sighting.time < one.ended}
        for storage in sighting.storages:
            live = by_address.get(storage.address)
            if live is not None and storage.category != "other tensor":
                found.setdefault(id(live), (storage.category, storage.name))
    return found


def _kept_labels(lives: Sequence[_Live], trace: Trace, places: Attribution) -> dict[int, tuple[str, str]]:
    """Return gradients and optimizer states by their lives: made in the backward and alive when the optimizer steps,
    or made by the optimizer and alive after it."""
    steps = sorted((one.start, one.end) for one in trace.host_events() if one.name.startswith("Optimizer.step#"))
    found: dict[int, tuple[str, str]] = {}
    for one in lives:
        if one.base is not None or not steps:
            continue
        module, phase = places.place(one.event)
        if phase == "backward" and any(one.born < start < one.ended for start, _ in steps):
            found[id(one)] = ("gradient", module or "outside modules")
        elif phase == "optimizer" and any(one.born < end < one.ended for _, end in steps):
            found[id(one)] = ("optimizer state", "")
    return found


def _role(one: _Live, places: Attribution) -> tuple[str, str]:
    module, phase = places.place(one.event)
    operator = _operator(one.event)
    if operator is not None and one.ended <= operator.end:
        return "workspace", f"{operator.name} in {module or phase}"
    match phase:
        case "forward" if module != ROOT:
            return "activation", module
        case "forward" | "other":
            return ("loss", operator.name if operator else "outside operators")
        case "recomputed":
            return "recomputed activation", module
        case "backward":
            return "activation gradient", module or "outside modules"
        case "optimizer":
            return "optimizer workspace", operator.name if operator else ""
        case "loader":
            return "batch", operator.name if operator else ""
        case _:
            return phase, operator.name if operator else ""


def _operator(event: HostEvent | None) -> HostEvent | None:
    """Return the outermost operator around an event that is no annotation."""
    found = None
    for one in event.ancestors() if event is not None else ():
        if one.kind == "cpu_op" and not one.name.startswith(("module::", "region::", "autograd::engine", "enumerate(")):
            found = one
        elif found is not None:
            break
    return found


def _where(top: _Live | None, places: Attribution) -> str:
    if top is None:
        return "the state before the first step"
    module, phase = places.place(top.event)
    operator = _operator(top.event)
    return " of ".join(part for part in (phase, module) if part) + (f" in {operator.name}" if operator else "")


def _same(one: int, other: int) -> bool:
    return (one < 0) == (other < 0) and (one < 0 or one == other)


def peak_values(peak: PeakMemory) -> dict[str, Any]:
    """Return the peak as JSON values, with its derived shares."""
    return {
        "device": peak.device,
        "bytes": peak.bytes,
        "reserved": peak.reserved,
        "fragmentation": peak.fragmentation,
        "capacity": peak.capacity,
        "where": peak.where,
        "named_share": peak.named_share,
        "by_category": peak.by_category(),
        "owners": [{"category": o.category, "name": o.name, "bytes": o.bytes, "count": o.count} for o in peak.owners],
    }
