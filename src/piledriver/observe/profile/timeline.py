"""A compact timeline of a rank for a page: what held when, the longest events of each lane, and memory over time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from piledriver.observe.profile.wall import CAUSES, Wall
from piledriver.observe.trace.attribution import MODULE, Attribution
from piledriver.observe.trace.chrome import Trace

_MOST = 4000
_POINTS = 1500


@dataclass(slots=True)
class RankTimeline:
    """Lanes of (start, duration, name) in microseconds after the window's begin."""

    begin_us: float
    """Start of the window in microseconds of the Unix clock, for lining up ranks."""
    base_us: float
    """The trace's base, after which collectives count their times."""
    wall_us: float
    lanes: dict[str, list[tuple[float, float, str]]] = field(default_factory=dict)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Allocated bytes over time on the first device, relative to the window's begin."""


def timeline(
    trace: Trace, places: Attribution, window: tuple[float, float], wall: Wall, main_thread: int
) -> RankTimeline:
    """Return the timeline of a window; where a lane has too many events, the longest are kept."""
    begin = window[0]
    lanes: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for cause in CAUSES:
        lanes["wall"] += [(start - begin, end - start, cause) for start, end in wall.lanes.get(cause, ())]
    for kernel in trace.kernels:
        lane = "communication" if kernel.is_communication else "device"
        place = places.place(kernel.launch)
        name = " ".join(filter(None, (kernel.name[:80], f"[{place.phase} {place.module}]".replace(" ]", "]"))))
        lanes[lane].append((kernel.start - begin, kernel.end - kernel.start, name))
    for one in trace.collectives:
        lanes["communication"].append((one.start - begin, one.duration, one.name))
    for thread, roots in trace.threads.items():
        stack = [(event, 0) for event in roots]
        name = "host" if thread == main_thread else "backward thread"
        while stack:
            event, depth = stack.pop()
            module = event.name.startswith(MODULE)
            if module:
                place = places.place(event)
                lanes[f"{name} {depth}"].append(
                    (event.start - begin, event.duration, f"{place.module} ({place.phase})")
                )
            elif event.kind == "user_annotation" or event.name.startswith("region::"):
                lanes[f"{name} {depth}"].append((event.start - begin, event.duration, event.name))
            elif event.name.startswith("autograd::engine"):
                shown = event.name.removeprefix("autograd::engine::evaluate_function: ")
                module_of = places.place(event).module
                lanes[f"{name} {depth}"].append((event.start - begin, event.duration, f"{shown} {module_of}".strip()))
                continue
            else:
                continue
            stack.extend((one, depth + 1) for one in event.children)
    kept = {
        name: sorted(sorted(found, key=lambda one: -one[1])[: _MOST if name != "wall" else None])
        for name, found in lanes.items()
        if found
    }
    rounded = {name: [(round(a, 2), round(b, 2), text) for a, b, text in found] for name, found in kept.items()}
    return RankTimeline(
        trace.base_ns / 1000 + begin, trace.base_ns / 1000, window[1] - window[0], rounded, _memory(trace, begin)
    )


def _memory(trace: Trace, begin: float) -> list[tuple[float, int]]:
    devices = {one.device for one in trace.allocations}
    if not devices:
        return []
    device = max(devices)
    points = [(one.time - begin, one.allocated) for one in trace.allocations if one.device == device]
    size = max(1, len(points) // _POINTS)
    # The largest of each stretch, so that the peak is kept.
    return [
        (round(part[0][0], 1), max(value for _, value in part))
        for part in (points[i : i + size] for i in range(0, len(points), size))
    ]
