"""Find the module and the phase of every host event: forward, backward, recomputed, optimizer, loader, and so on.

Module annotations enclose a module's forward. A function of the backward belongs to the module whose forward recorded
it, which the trace's flows tell; a module annotation inside the backward is a recomputation.
"""

from __future__ import annotations

from typing import NamedTuple

from piledriver.observe.trace.chrome import HostEvent, Trace

MODULE = "module::"
"""Prefix of the annotation of a module's forward."""
REGION = "region::"
"""Prefix of the annotation of a part of the loop, such as the loader."""
PARTS = ("forward", "backward", "recomputed", "optimizer", "other")
"""Phases that are not regions."""
ROOT = ""
"""The module of work outside every module."""

_BACKWARD = "autograd::engine::evaluate_function"
_LOADER = "enumerate(DataLoader)"
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")


class Place(NamedTuple):
    """Where in the model and in the step an event lies."""

    module: str
    phase: str
    """`forward`, `backward`, `recomputed`, `optimizer`, a region such as `loader`, or `other`."""


class Attribution:
    """Module and phase of the events of a trace, remembered for each event."""

    def __init__(self, trace: Trace) -> None:
        self._known: dict[int, Place] = {}
        for event in trace.host_events():
            self._known[id(event)] = self._of(event)

    def place(self, event: HostEvent | None) -> Place:
        """Return the place of an event; of none, the outermost."""
        return Place(ROOT, "other") if event is None else self._known[id(event)]

    def _of(self, event: HostEvent) -> Place:
        above = Place(ROOT, "other") if event.parent is None else self._known[id(event.parent)]
        name = event.name
        if name.startswith(MODULE):
            path = name[len(MODULE) :]
            return Place(path, "recomputed" if above.phase in ("backward", "recomputed") else "forward")
        if name.startswith(REGION):
            return Place(above.module, name[len(REGION) :])
        if name.startswith(_LOADER):
            return Place(above.module, "loader")
        if name.startswith(_OPTIMIZER):
            return Place(ROOT, "optimizer")
        if name.startswith(_BACKWARD):
            # The link stands on the function inside, where the trace drew it, or on this event.
            linked = event.forward or next((one.forward for one in event.children if one.forward is not None), None)
            return Place(self._forward_module(linked), "backward")
        return above

    def _forward_module(self, event: HostEvent | None) -> str:
        if event is None:
            return ROOT
        for one in event.ancestors():
            if one.name.startswith(MODULE):
                return one.name[len(MODULE) :]
        return ROOT
