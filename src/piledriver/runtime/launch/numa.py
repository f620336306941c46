"""NUMA binding: keep a process on the cores near its device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from piledriver.runtime.collectives.split import shard_bounds
from piledriver.runtime.world import World, detect_world

_NODES = Path("/sys/devices/system/node")


def bind_to_near_cores(world: World | None = None) -> list[int]:
    """Bind this process to the cores near its device and return them; without NUMA nodes, to its part of all cores.

    Only cores that this process may already use are taken, so that a container's limits hold.
    """
    world = detect_world() if world is None else world
    allowed = sorted(os.sched_getaffinity(0))
    cores = near_cores(world, allowed, numa_nodes(), _device_node(world))
    os.sched_setaffinity(0, cores)
    return cores


def near_cores(world: World, allowed: list[int], nodes: list[list[int]], device_node: int | None) -> list[int]:
    """Return the cores of one process: those of its device's node if known, else its part of all nodes in order.

    >>> two = World(rank=1, size=2, local_rank=1, local_size=2)
    >>> near_cores(two, [0, 1, 2, 3], [[0, 1], [2, 3]], None)
    [2, 3]
    """
    if device_node is not None and device_node < len(nodes):
        near = [core for core in nodes[device_node] if core in allowed]
        if near:
            return near
    ordered = [core for node in nodes for core in node if core in allowed] or allowed
    start, end = shard_bounds(len(ordered), world.local_rank, world.local_size)
    return ordered[start:end] or ordered


def numa_nodes() -> list[list[int]]:
    """Return the cores of each NUMA node, in the kernel's order."""
    folders = sorted(_NODES.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    return [parse_core_list((folder / "cpulist").read_text()) for folder in folders]


def parse_core_list(text: str) -> list[int]:
    """Parse the kernel's list of cores.

    >>> parse_core_list("0-2,8")
    [0, 1, 2, 8]
    """
    cores: list[int] = []
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low:
            cores += range(int(low), int(high or low) + 1)
    return cores


def _device_node(world: World) -> int | None:
    if world.device.type != "cuda":
        return None
    import torch

    properties: Any = torch.cuda.get_device_properties(world.device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    file = Path("/sys/bus/pci/devices") / address / "numa_node"
    node = int(file.read_text()) if file.is_file() else -1
    return node if node >= 0 else None
