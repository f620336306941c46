"""Device maps for hardware that is named, and may not be at hand: accelerators fastest first, then host, then disk."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from piledriver.plan.errors import PlanError
from piledriver.plan.hardware.cluster import HEADROOM, Cluster
from piledriver.plan.hardware.parse import parse_hardware
from piledriver.plan.placement.by_time import DeviceMap, LinkRates, Place, place_by_time
from piledriver.plan.placement.room import Room, inference_room

# The context of a device.
_CONTEXT_BYTES = 0.6 * 2**30
# Room for the activations of a model that takes no tokens, as a share of a device.
_UNKNOWN_SHARE = 0.1


def device_map(
    model: nn.Module,
    *,
    batch: int = 1,
    length: int = 2048,
    hardware: str | Cluster = "here",
    dtype: torch.dtype | None = None,
    max_memory: Mapping[Place, float] | None = None,
) -> DeviceMap:
    """Return where each module goes for a batch of `batch` sequences of `length` tokens; the model may be on meta.

    `dtype` is that of the weights once loaded; `max_memory` limits places, by bytes.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
    >>> made = device_map(model, hardware="2xl4", max_memory={0: 4e9, 1: 2e8})
    >>> made.places["0"], made.streamed
    (0, 0)
    """
    cluster = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    memory = _memory(cluster, max_memory or {})
    try:
        room = inference_room(model, batch, length, dtype)
    except PlanError:
        room = Room(int(_UNKNOWN_SHARE * cluster.smallest_memory), 0)
    rates = LinkRates.of(cluster)
    return place_by_time(model, memory, batch=batch, length=length, dtype=dtype, rates=rates, room=room)


def _memory(cluster: Cluster, limits: Mapping[Place, float]) -> dict[Place, int]:
    """Return the bytes that weights may take in each place, the fastest device first."""
    host = cluster.host.memory * cluster.count * (1 - HEADROOM)
    found: dict[Place, int] = {}
    if cluster.device.kind != "cpu":
        devices = cluster.devices()
        # Of alike ones the first first.
        for number in sorted(range(len(devices)), key=lambda number: -devices[number].bandwidth):
            free = devices[number].memory * (1 - HEADROOM) - _CONTEXT_BYTES
            if limits.get(number, 1.0) > 0:
                found[number] = int(min(free, limits.get(number, free)))
    return {**found, "cpu": int(min(host, limits.get("cpu", host)))}
