"""Place the modules of a large model for inference: on accelerators, in host memory or on disk, by predicted time.

Accelerators are filled fastest first, each with room for its activations and the key-value cache of its blocks. What
does not fit is streamed: from host memory while there is room, then from disk. The first accelerator computes it, and
keeps room for two streamed modules and their cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from piledriver.core.errors import PiledriverError
from piledriver.engine.blocks import blocks_of
from piledriver.models.config import ModelConfig
from piledriver.models.model_size import cache_bytes_per_token
from piledriver.plan.entry import config_of
from piledriver.plan.errors import PlanError
from piledriver.plan.hardware.cluster import Cluster, Device
from piledriver.plan.hardware.parse import parse_hardware
from piledriver.plan.prediction import HEADROOM

_GIB = 2**30
# The context of a device.
_CONTEXT_BYTES = 0.6 * _GIB
# Room for the activations of a model whose shape is unknown, as a share of a device.
_UNKNOWN_SHARE = 0.1

Place = int | str
"""The number of an accelerator, "cpu" or "disk"."""


@dataclass(frozen=True, kw_only=True)
class DeviceMap:
    """Module names to places, as `device_map` of Accelerate and transformers takes them, with its prediction."""

    places: dict[str, Place]
    weights: dict[Place, float]
    """Bytes of weights in each place."""
    room: dict[Place, float]
    """Bytes that each accelerator keeps free for cache, activations and streamed modules."""
    seconds: float
    """Predicted seconds of one forward of the batch."""

    @property
    def streamed(self) -> float:
        """Bytes of weights that every forward brings to an accelerator."""
        return sum(size for place, size in self.weights.items() if isinstance(place, str))


@dataclass(frozen=True)
class _Unit:
    """Modules that stay together, with their weights and their cache."""

    names: tuple[str, ...]
    bytes: float
    elements: float
    cache: float


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

    `dtype` is that of the weights once loaded; `max_memory` limits places, by bytes. Tied modules stay together.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))
    >>> made = device_map(model, hardware="2xl4", max_memory={0: 4e9, 1: 2e8})
    >>> made.places["0"], made.streamed
    (0, 0)
    """
    cluster = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    config = _config(model)
    units = _units(model, config, batch, length, dtype)
    if cluster.device.kind == "cpu":
        return DeviceMap(places=_named(units, ["cpu"] * len(units)), weights={}, room={}, seconds=0.0)
    limits = dict(max_memory or {})
    devices = cluster.devices()
    # By speed; of alike ones the first first.
    order = sorted(range(len(devices)), key=lambda number: -devices[number].bandwidth)
    order = [number for number in order if limits.get(number, 1.0) > 0]
    activations = _activations(config, batch, length, units)
    capacity = {}
    for number in order:
        memory = devices[number].memory * (1 - HEADROOM) - _CONTEXT_BYTES
        needed = activations or _UNKNOWN_SHARE * devices[number].memory
        capacity[number] = min(memory, limits.get(number, memory)) - needed
    host = min(cluster.host.memory * cluster.count * (1 - HEADROOM), limits.get("cpu", float("inf")))
    places = _fill(units, order, capacity)
    if places is None:
        places = _fill_streaming(units, order, capacity, host)
    weights: dict[Place, float] = {}
    room: dict[Place, float] = dict.fromkeys(order, activations)
    for unit, place in zip(units, places, strict=True):
        weights[place] = weights.get(place, 0.0) + unit.bytes
        computed = place if isinstance(place, int) else order[0]
        room[computed] = room.get(computed, 0.0) + unit.cache
    return DeviceMap(
        places=_named(units, places),
        weights=weights,
        room=room,
        seconds=_seconds(units, places, devices, order[0], cluster, batch * length),
    )


def _fill(units: list[_Unit], order: list[int], capacity: Mapping[int, float]) -> list[Place] | None:
    """Fill accelerators in order with consecutive units; None if they do not hold all."""
    places: list[Place] = []
    position, free = 0, capacity[order[0]] if order else 0.0
    for unit in units:
        needed = unit.bytes + unit.cache
        while position < len(order) and needed > free:
            position += 1
            free = capacity[order[position]] if position < len(order) else 0.0
        if position == len(order):
            return None
        places.append(order[position])
        free -= needed
    return places


def _fill_streaming(units: list[_Unit], order: list[int], capacity: Mapping[int, float], host: float) -> list[Place]:
    """Keep as many units as fit beside two streamed ones and all streamed cache; stream the rest."""
    for kept in range(len(units) - 1, -1, -1):
        rest = units[kept:]
        reserved = 2 * max(unit.bytes for unit in rest) + sum(unit.cache for unit in rest)
        left = {**capacity, order[0]: capacity[order[0]] - reserved}
        found = _fill(units[:kept], order, left) if kept else ([] if left[order[0]] >= 0 else None)
        if found is None:
            continue
        free = host
        for unit in rest:
            free -= unit.bytes
            found.append("cpu" if free >= 0 else "disk")
        return found
    largest = max(unit.bytes for unit in units) / _GIB
    raise PlanError(
        f"no accelerator has room for two streamed modules of {largest:.2f} GiB, the cache and the activations",
        fix="use a smaller batch or shorter sequences",
    )


def _seconds(
    units: list[_Unit], places: list[Place], devices: list[Device], first: int, cluster: Cluster, tokens: int
) -> float:
    """Each module waits for its products, the read of its weights, or the stream that brings them."""
    total = 0.0
    for unit, place in zip(units, places, strict=True):
        device = devices[place if isinstance(place, int) else first]
        products = 2.0 * unit.elements * tokens / (device.peak("bf16") * device.efficiency["matmul"])
        read = unit.bytes / (device.bandwidth * device.efficiency["memory"])
        stream = 0.0
        if isinstance(place, str):
            stream = unit.bytes / (cluster.host.link if place == "cpu" else cluster.host.disk)
        total += max(products, read, stream)
    return total


def _units(
    model: nn.Module, config: ModelConfig | None, batch: int, length: int, dtype: torch.dtype | None
) -> list[_Unit]:
    blocks = set(blocks_of(model))
    cache = 0.0
    if config is not None and blocks:
        cache = batch * length * cache_bytes_per_token(config) / len(blocks)
    found: list[_Unit] = []
    owner: dict[int, int] = {}
    for name, tensors in _parts(model, blocks):
        # A part that shares its weights joins the one that has them.
        shared = next((owner[id(one)] for one in tensors if id(one) in owner), None)
        new = [one for one in tensors if id(one) not in owner]
        size = sum(one.numel() * _itemsize(one, dtype) for one in new)
        elements = sum(one.numel() for one in new)
        if shared is None:
            found.append(_Unit((name,), size, elements, cache if name in blocks else 0.0))
        else:
            old = found[shared]
            found[shared] = _Unit((*old.names, name), old.bytes + size, old.elements + elements, old.cache)
        for one in new:
            owner[id(one)] = len(found) - 1 if shared is None else shared
    return found


def _parts(model: nn.Module, blocks: set[str], prefix: str = "") -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield blocks, modules that hold none, and the tensors of modules that hold some."""
    for name, tensor in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)):
        yield f"{prefix}{name}", [tensor]
    for name, module in model.named_children():
        path = f"{prefix}{name}"
        if path in blocks or not any(block.startswith(f"{path}.") for block in blocks):
            yield path, [*module.parameters(), *module.buffers()]
        else:
            yield from _parts(module, blocks, f"{path}.")


def _named(units: list[_Unit], places: list[Place]) -> dict[str, Place]:
    return {name: place for unit, place in zip(units, places, strict=True) for name in unit.names}


def _activations(config: ModelConfig | None, batch: int, length: int, units: list[_Unit]) -> float:
    """Bytes of the widest place of a forward, and of its logits in two dtypes; 0 if the shape is unknown."""
    if config is None or not units:
        return 0.0
    tokens = batch * length
    return tokens * (4.0 * config.dim + 3.0 * config.mlp_dim) * 2 + tokens * config.vocab_size * 6.0


def _config(model: nn.Module) -> ModelConfig | None:
    try:
        return config_of(model)[0]
    except PiledriverError:
        return None


def _itemsize(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    return tensor.element_size() if dtype is None or not tensor.is_floating_point() else dtype.itemsize
