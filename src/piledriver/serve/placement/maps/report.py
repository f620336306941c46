"""Lines that describe a device map and what its stream measured."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from piledriver.engine.offload.stream.model_stream import ModelStream
from piledriver.engine.offload.tier import Tier
from piledriver.plan.placement.by_time import DeviceMap, LinkRates


def map_lines(plan: DeviceMap, rates: LinkRates) -> list[str]:
    """Return the places of a map with their bytes, neighbours on one place as one entry."""
    room = plan.needs
    lines = [
        f"room for activations {room.activations / 2**20:,.0f} MiB and key-value cache {room.cache / 2**20:,.0f} MiB; "
        f"host link {rates.host / 1e9:.1f} GB/s, disk {rates.disk / 1e9:.2f} GB/s"
    ]
    runs = [(place, [name for name, _ in run]) for place, run in groupby(plan.places.items(), key=lambda it: it[1])]
    for place, names in runs:
        lines.append(f"  {_where(place):<8} {names[0] if len(names) == 1 else f'{names[0]} to {names[-1]}'}")
    totals = [f"{_where(place)} {size / 2**20:,.0f} MiB" for place, size in plan.weights.items()]
    return [*lines, f"weights: {', '.join(totals)}"]


def _where(place: Any) -> str:
    return f"device {place}" if isinstance(place, int) else str(place)


def rate_line(stream: ModelStream) -> str:
    """Return at which rates weights arrived, and how many blocks were fetched ahead."""
    found = [(tier.value, stream.stream.measured_rate(tier)) for tier in (Tier.HOST, Tier.DISK)]
    rates = [f"{name} {rate / 1e9:.2f} GB/s" for name, rate in found if rate]
    return f"weights came from {', '.join(rates)}, {stream.stream.depth} blocks ahead"
