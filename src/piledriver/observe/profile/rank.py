"""`RankProfile`: what one rank's trace and notes say, as values that can be sent to rank 0 and saved as JSON."""

from __future__ import annotations

import os
import socket
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from piledriver.observe.memory.peak import PeakMemory, StorageSighting, peak_memory
from piledriver.observe.profile.collect import Notes
from piledriver.observe.profile.collectives import CollectiveCall, traced_collectives
from piledriver.observe.profile.document_boundaries import DocumentBoundaries
from piledriver.observe.profile.facts import collect_facts
from piledriver.observe.profile.input_output import InputOutput, input_output
from piledriver.observe.profile.module_tree import ModuleRow, Roofline, Work, collect_work, module_tree
from piledriver.observe.profile.timeline import RankTimeline, timeline
from piledriver.observe.profile.wall import CAUSES, Wall, split_wall
from piledriver.observe.trace.attribution import Attribution
from piledriver.observe.trace.chrome import Trace


@dataclass(slots=True)
class OperatorRow:
    """One operator over all modules."""

    name: str
    calls: int
    seconds: float
    flops: int
    bytes: int


@dataclass(slots=True)
class RankProfile:
    """Time, work, memory, communication and I/O of one rank over the profiled steps."""

    rank: int
    host: str
    device: str
    wall_seconds: float
    steps: int
    step_seconds: list[float]
    seconds: dict[str, float]
    """Wall time by cause; sums to `wall_seconds`."""
    kernel_seconds: dict[str, float]
    modules: list[ModuleRow]
    operators: list[OperatorRow]
    memory: list[PeakMemory]
    collectives: list[CollectiveCall]
    input_output: list[InputOutput]
    facts: dict[str, Any]
    timeline: RankTimeline
    uncounted: dict[str, int] = field(default_factory=dict)
    """Operators with a FLOP formula that the trace was not enough for."""
    error: str = ""

    @property
    def flops(self) -> int:
        """FLOPs of the window, recomputed ones included."""
        return sum(sum(row.flops.values()) for row in self.modules if "." not in row.path)


def rank_profile(trace: Trace, notes: Notes, *, rank: int = 0, roofline: Roofline | None = None) -> RankProfile:
    """Analyse the trace of one rank."""
    places = Attribution(trace)
    window = (trace.time_of(notes.begin_ns), trace.time_of(notes.end_ns))
    calls = traced_collectives(trace, window, notes.collectives)
    sent = [(one.start, one.end) for one in calls]
    wall = split_wall(trace, places, window, main_thread=notes.thread, blocked_us=notes.blocked_us, collectives=sent)
    unknown: Counter[str] = Counter()
    boundaries = DocumentBoundaries((trace.time_of(time), offsets) for time, offsets in notes.boundaries)
    work = collect_work(trace, places, window, unknown, boundaries)
    ends = [trace.time_of(mark) for mark in notes.marks_ns]
    steps = max(1, len(ends))
    return RankProfile(
        rank=rank,
        host=f"{socket.gethostname()}:{os.getpid()}",
        device=notes.device_name,
        wall_seconds=wall.total,
        steps=steps,
        step_seconds=[(end - start) / 1e6 for start, end in zip([window[0], *ends], ends, strict=False)],
        seconds=_rounded(wall),
        kernel_seconds=wall.kernels,
        modules=module_tree(work, notes.modules, None if roofline is None else roofline.raised_by(work)),
        operators=_operators(work),
        memory=_memory(trace, places, notes),
        collectives=calls,
        input_output=input_output(trace, places, window, wall, notes.thread),
        facts=collect_facts(trace, places, window, wall, work, notes),
        timeline=timeline(trace, places, window, wall, notes.thread),
        uncounted=dict(unknown),
        error=notes.error,
    )


def _rounded(wall: Wall) -> dict[str, float]:
    return {cause: wall.seconds[cause] for cause in CAUSES}


def _operators(work: list[Work], most: int = 200) -> list[OperatorRow]:
    found: dict[str, OperatorRow] = {}
    for one in work:
        row = found.setdefault(one.operator, OperatorRow(one.operator, 0, 0.0, 0, 0))
        row.calls += one.calls
        row.seconds += one.seconds
        row.flops += one.flops
        row.bytes += one.bytes
    return sorted(found.values(), key=lambda row: -row.seconds)[:most]


def _memory(trace: Trace, places: Attribution, notes: Notes) -> list[PeakMemory]:
    """Return the peak of each device with allocations, accelerators first."""
    sightings = [StorageSighting(trace.time_of(time), storages) for time, storages in notes.sightings]
    sizes: dict[int, int] = defaultdict(int)
    for one in trace.allocations:
        sizes[one.device] += abs(one.size)
    found = []
    for device in sorted(sizes, reverse=True):
        given: dict[str, Any] = {"released": {a: trace.time_of(ns) for a, ns in notes.released_ns.items()}}
        if device >= 0:
            given = {
                "allocated_before": notes.allocated_before,
                "reserved": notes.reserved_peak,
                "capacity": notes.capacity,
            }
        found.append(peak_memory(trace, places, sightings, device=device, **given))
    return found
