"""What the loader, the tokeniser, checkpoints and trackers cost, and whether a step waited for them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from piledriver.observe.profile.wall import Wall
from piledriver.observe.trace.attribution import PARTS, Attribution
from piledriver.observe.trace.chrome import HostEvent, Trace
from piledriver.observe.trace.intervals import Intervals, intersect, length, subtract, union


@dataclass(slots=True)
class InputOutput:
    """One part of the loop that is not the model: `loader`, `tokeniser`, `checkpoint`, `tracker`, or a named region."""

    name: str
    calls: int
    seconds: float
    """Time inside it on the loop's thread."""
    background_seconds: float
    """Time inside it on other threads."""
    waited_seconds: float
    """Time that the step waited: no kernel ran meanwhile, or, on a CPU, no operator beside it."""


def input_output(
    trace: Trace, places: Attribution, window: tuple[float, float], wall: Wall, main_thread: int
) -> list[InputOutput]:
    """Return the cost of every region of a window, most waited for first."""
    found: dict[str, list[HostEvent]] = defaultdict(list)
    for roots in trace.threads.values():
        stack = list(roots)
        while stack:
            event = stack.pop()
            phase = places.place(event).phase
            if phase not in PARTS and event.end > window[0] and event.start < window[1]:
                found[phase].append(event)
            else:
                stack.extend(event.children)
    whole: Intervals = [window]
    device = union((one.start, one.end) for one in trace.kernels)
    rows = []
    for name, events in found.items():
        own = intersect(whole, union((one.start, one.end) for one in events if one.thread == main_thread))
        other = intersect(whole, union((one.start, one.end) for one in events if one.thread != main_thread))
        waited = subtract(own, device) if trace.kernels else own
        rows.append(InputOutput(name, len(events), length(own) / 1e6, length(other) / 1e6, length(waited) / 1e6))
    return sorted(rows, key=lambda row: -row.waited_seconds)
