"""Device maps by predicted time: keep as many blocks on devices as fit beside activations and cache, stream the rest.

A streamed weight is read once for every forward whichever block it belongs to, so the number of resident blocks sets
the bytes; their order sets how much of the transfer is hidden. Candidates (resident blocks first, or spread evenly
among streamed ones) are timed by simulating the stream, and the fastest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from piledriver.engine.blocks import blocks_of
from piledriver.engine.offload.stream.depth import cycle_seconds, window_bytes
from piledriver.engine.shards.tied_parameters import find_tied
from piledriver.observe.memory import readable
from piledriver.plan.errors import PlanError
from piledriver.plan.hardware.cluster import Cluster, Device
from piledriver.plan.hardware.here import detect_cluster
from piledriver.plan.placement.room import WORKSPACE_BYTES, Room, inference_room
from piledriver.plan.placement.sizes import compute_module_sizes

DEPTHS = (1, 0)
"""Blocks that are fetched ahead: one, or none where a device has no memory for two."""

Place = Any
"""The number of an accelerator, "cpu" or "disk"."""


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """Bytes per second to the device that computes, and the rates of that device."""

    host: float
    disk: float
    memory: float
    """Bytes per second of its own memory."""
    flops: float
    others: Mapping[Place, tuple[float, float]] = field(default_factory=dict)
    """`memory` and `flops` of devices that differ."""

    @classmethod
    def of(cls, cluster: Cluster) -> LinkRates:
        """Return the rates of a cluster: calibrated ones where it has them."""
        device, host = cluster.device, cluster.host
        known = device.measured
        memory, flops = _device_rates(device)
        return cls(
            host=float(known.get("host_link", host.link)),  # type: ignore[arg-type]
            disk=float(known.get("disk_read", host.disk)),  # type: ignore[arg-type]
            memory=memory,
            flops=flops,
            others={number: _device_rates(one) for number, one in enumerate(cluster.devices()) if one is not device},
        )

    def compute_seconds(self, nbytes: int, tokens: int, place: Place) -> float:
        """Return the seconds of a module on a device: it reads every weight once and multiplies by each token."""
        memory, flops = self.others.get(place, (self.memory, self.flops))
        # Two bytes and two operations for each weight.
        return max(nbytes / memory, tokens * nbytes / flops)


def _device_rates(device: Device) -> tuple[float, float]:
    return device.bandwidth * device.efficiency["memory"], device.peak("bf16") * device.efficiency["matmul"]


def rates_here() -> LinkRates:
    """Return the rates of this machine; modest ones where the process has no memory to measure them."""
    try:
        return LinkRates.of(detect_cluster())
    except (RuntimeError, MemoryError):
        return LinkRates(host=10e9, disk=1e9, memory=10e9, flops=50e9)


@dataclass(frozen=True, kw_only=True)
class DeviceMap:
    """Module names to places, as `device_map` of Accelerate and transformers takes them, with its prediction."""

    places: dict[str, Place]
    weights: dict[Place, int]
    """Bytes of weights in each place."""
    room: dict[Place, int]
    """Bytes that each device keeps free for activations, cache and streamed blocks."""
    needs: Room
    """Activations and cache of the whole model."""
    depth: int
    """Streamed blocks ahead of the one that computes that `room` holds."""
    spare: int
    """Bytes of the main device that are left: more streamed blocks may be fetched ahead into them."""
    seconds: float
    """Of one forward of one token for each sequence."""
    prompt_seconds: float
    """Of one forward of all tokens of the batch."""

    @property
    def streamed(self) -> int:
        """Bytes of weights that every forward brings to the device."""
        main = next(iter(self.room))
        return sum(size for place, size in self.weights.items() if _is_streamed(place, main))

    def __str__(self) -> str:
        parts = [f"{place}: {readable(size)}" for place, size in self.weights.items()]
        return f"{', '.join(parts)}; {self.seconds:.3g} s a token"


def place_by_time(
    model: nn.Module,
    memory: Mapping[Any, int],
    *,
    batch: int,
    length: int,
    dtype: torch.dtype | None = None,
    rates: LinkRates | None = None,
    no_split: Sequence[str] = (),
    window: float = 1.0,
    room: Room | None = None,
    depths: Sequence[int] = DEPTHS,
) -> DeviceMap:
    """Return the fastest map that leaves room for a batch of sequences of `length` tokens.

    `memory` gives bytes by device: integers for accelerators, "cpu"; what does not fit there is on disk. A streamed
    block takes `window` times its bytes while it is on the device. `room` is counted unless it is given. The first
    device is the main one: it computes what is streamed and holds what is outside the blocks. Of `depths`, the first is
    taken for which there is memory.
    """
    sizes = compute_module_sizes(model, dtype=dtype)
    room = room or inference_room(model, batch, length, dtype)
    blocks = _blocks(model, no_split)
    ends, tied = _ends(model, blocks), [sorted(group) for group in find_tied(model)]
    rates = rates or rates_here()
    accelerators = [device for device in memory if device not in ("cpu", "disk")]
    main = accelerators[0] if accelerators else "cpu"
    block_sizes = [sizes.get(name, 0) for name in blocks]
    cache = [room.cache * size // max(sum(block_sizes), 1) for size in block_sizes]
    free = {
        device: memory[device] - room.activations - (WORKSPACE_BYTES if accelerators else 0)
        for device in accelerators or ["cpu"]
    }
    shared = sum(sizes.get(name, 0) for group in tied for name in group[1:] if name in sizes)
    free[main] -= sum(sizes.get(name, 0) for name in ends) - shared
    host = int(memory.get("cpu", 0)) if accelerators else 0
    for depth in depths:
        found = _candidates(block_sizes, cache, free, main, host, window, depth)
        if found:
            break
    else:
        need = memory[main] - free[main] + window * window_bytes(block_sizes, depths[-1]) + room.cache
        blocks_needed = "two blocks" if depths[-1] else "one block"
        raise PlanError(
            f"{main} may hold {readable(memory[main])}; activations, cache, {blocks_needed} and what is outside the "
            f"blocks (embedding, output projection) need {readable(need)} at batch {batch} and length {length}",
            fix="raise the memory limit, or lower the batch or the length",
        )
    timed = [
        [_seconds(places, block_sizes, tokens, rates, main, depth) for tokens in (batch, batch * length)]
        for places in found
    ]
    # Of maps that decode as fast, to one percent, the one that reads a prompt faster.
    best = min(range(len(found)), key=lambda one: (round(math.log(timed[one][0]) * 100), timed[one][1]))
    places, (seconds, prompt_seconds) = found[best], timed[best]
    device_map = {**dict.fromkeys(ends, main), **dict(zip(blocks, places, strict=True))}
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    order = {name: number for number, name in enumerate(names)}
    device_map = dict(sorted(device_map.items(), key=lambda item: order[item[0]]))
    totals: dict[Place, int] = {}
    for place in dict.fromkeys([*memory, "disk"]):
        if held := sum(sizes.get(name, 0) for name, at in device_map.items() if at == place):
            totals[place] = held
    kept: dict[Place, int] = dict.fromkeys(free, room.activations)
    for place, size in zip(places, cache, strict=True):
        kept[place if place in kept else main] += size
    streamed = [size for size, place in zip(block_sizes, places, strict=True) if _is_streamed(place, main)]
    kept[main] += int(window * window_bytes(streamed, depth))
    resident = sum(size for size, place in zip(block_sizes, places, strict=True) if place == main)
    spare = free[main] - resident - (kept[main] - room.activations)
    return DeviceMap(
        places=device_map,
        weights=totals,
        room=kept,
        needs=room,
        depth=depth,
        spare=max(int(spare), 0),
        seconds=seconds,
        prompt_seconds=prompt_seconds,
    )


def _is_streamed(place: Place, main: Place) -> bool:
    return bool(place == "disk" or (place == "cpu" and main != "cpu"))


def _blocks(model: nn.Module, no_split: Sequence[str]) -> list[str]:
    """Return the names of what is placed as one: blocks, or layers where nothing repeats."""
    if no_split:
        return [name for name, module in model.named_modules() if type(module).__name__ in no_split]
    repeated = list(blocks_of(model))
    layers = [name for name, module in model.named_modules() if name and not any(True for _ in module.children())]
    return repeated or [name for name in layers if any(True for _ in model.get_submodule(name).parameters())]


def _ends(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return the largest modules and the parameters outside the blocks: embedding, norm, output projection."""
    found: list[str] = []

    def walk(module: nn.Module, path: str) -> None:
        for name in module._parameters:
            if module._parameters[name] is not None:
                found.append(f"{path}.{name}".lstrip("."))
        for name in module._buffers:
            if module._buffers[name] is not None:
                found.append(f"{path}.{name}".lstrip("."))
        for name, child in module.named_children():
            full = f"{path}.{name}".lstrip(".")
            if full in blocks:
                continue
            if any(block.startswith(f"{full}.") for block in blocks):
                walk(child, full)
            elif any(True for _ in (*child.parameters(), *child.buffers())):
                found.append(full)

    walk(model, "")
    return found


def _candidates(
    sizes: list[int], cache: list[int], free: dict[Any, int], main: Any, host: int, window: float, depth: int
) -> list[list[Any]]:
    """Return the places of the blocks in several orders; none if the main device has no room to stream."""
    count, total = len(sizes), sum(sizes) + sum(cache)
    if total <= free[main]:
        return [[main] * count]
    # Whole runs at the end go to the other devices: each boundary costs one transfer of activations.
    places: list[Any] = [None] * count
    last = count
    for device in [one for one in free if one != main]:
        left = free[device]
        while last > 0 and sizes[last - 1] + cache[last - 1] <= left:
            last -= 1
            left -= sizes[last] + cache[last]
            places[last] = device
    # Streamed blocks keep their cache on the main device.
    left = free[main] - sum(cache[:last])
    orders = [list(range(last)), _evenly(last), sorted(range(last), key=lambda i: -sizes[i])]
    found = []
    for order in orders:
        resident = _fill(order, sizes[:last], left, depth, window)
        if resident is not None:
            found.append([*_tiers(sizes[:last], resident, main, host), *places[last:]])
    return found


def _fill(order: list[int], sizes: list[int], left: int, depth: int, window: float) -> set[int] | None:
    """Return the blocks, taken in this order, that fit beside the memory of the stream; None if nothing does."""
    resident: set[int] = set()
    used = 0

    def fits(these: set[int], size: int) -> bool:
        streamed = [sizes[i] for i in range(len(sizes)) if i not in these]
        return size + window * window_bytes(streamed, depth) <= left

    for block in order:
        if fits({*resident, block}, used + sizes[block]):
            resident.add(block)
            used += sizes[block]
    return resident if fits(resident, used) else None


def _tiers(sizes: list[int], resident: set[int], main: Any, host: int) -> list[Any]:
    """Return the place of each block; those that the host cannot hold are on disk, evenly among the others."""
    streamed = [i for i in range(len(sizes)) if i not in resident]
    on_host: set[int] = set()
    for i in (streamed[place] for place in _evenly(len(streamed))):
        if sizes[i] <= host:
            on_host.add(i)
            host -= sizes[i]
    return [main if i in resident else "cpu" if i in on_host else "disk" for i in range(len(sizes))]


def _evenly(count: int) -> list[int]:
    """Return the numbers below `count` in an order of which every beginning is spread evenly.

    >>> _evenly(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    bits = max(count - 1, 0).bit_length()
    reverse = [int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(1 << bits)]
    return [i for i in reverse if i < count]


def _seconds(places: list[Any], sizes: list[int], tokens: int, rates: LinkRates, main: Any, depth: int) -> float:
    """Return the seconds of a forward over so many tokens; compute reads every weight once from device memory."""
    streamed = [i for i, place in enumerate(places) if _is_streamed(place, main)]
    where = [main if i in streamed else place for i, place in enumerate(places)]
    compute = [rates.compute_seconds(size, tokens, place) for size, place in zip(sizes, where, strict=True)]
    if not streamed:
        return sum(compute)
    # Resident blocks compute while the next streamed one is on its way.
    fetch = [sizes[i] / (rates.disk if places[i] == "disk" else rates.host) for i in streamed]
    until = [*streamed[1:], len(places)]
    spans = [sum(compute[i:end]) for i, end in zip(streamed, until, strict=True)]
    spans[-1] += sum(compute[: streamed[0]])
    return cycle_seconds(fetch, spans, depth)
