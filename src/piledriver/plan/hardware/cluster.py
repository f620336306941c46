"""`Cluster`: the devices that a plan is made for, as a value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

HEADROOM = 0.04
"""Of memory, left free by a plan: what the allocator may need beyond the prediction."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between devices, as one device sees it."""

    name: str
    bytes_per_second: float
    """One direction."""
    latency: float
    """Seconds of one hop of a collective."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One device's share of its node: host memory, the link to it, disk, and CPU optimizer speed."""

    name: str
    memory: float
    link: float
    disk: float
    adam: float
    """Parameters per second of the fused AdamW on the host."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator: rates in operations and bytes per second, memory in bytes."""

    name: str
    memory: float
    bandwidth: float
    peaks: Mapping[str, float]
    tile: int
    """Matrix tiles that run at once (SMs, compute units)."""
    watts: float
    dollars: float
    """Price of one device for an hour."""
    efficiency: Mapping[str, float]
    """Share of the peak that each kernel class reaches."""
    kind: str = "cuda"
    measured: Mapping[str, object] = field(default_factory=dict)
    """Rates that `calibrate` measured, with their date; empty without a calibration."""

    def peak(self, precision: str) -> float:
        """Return the peak of a dtype; a device without it computes in the next wider one."""
        wider = {"fp8": ("fp8", "bf16", "fp16", "fp32"), "bf16": ("bf16", "fp16", "fp32"), "fp16": ("fp16", "fp32")}
        for name in wider.get(precision, (precision, "fp32")):
            if name in self.peaks:
                return self.peaks[name]
        return self.peaks["fp32"]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices with their links, in rank order; they may differ in speed and memory."""

    device: Device
    count: int
    node_size: int
    link: Link
    """Inside a node."""
    network: Link
    """Between nodes, for one device."""
    host: Host
    others: tuple[tuple[int, Device], ...] = ()
    """Further (count, device) groups of a heterogeneous cluster; `count` includes them."""

    @property
    def name(self) -> str:
        """The cluster as one word, such as `64xh100-80g`."""
        return "+".join(f"{count}x{device.name}" for count, device in self.groups)

    @property
    def groups(self) -> tuple[tuple[int, Device], ...]:
        """Devices of one kind after another, in rank order: how many, and one of them."""
        return (self.count - sum(count for count, _ in self.others), self.device), *self.others

    @property
    def slowest(self) -> Device:
        """The device with the lowest bf16 peak, which a uniform layout waits for."""
        return min((self.device, *(device for _, device in self.others)), key=lambda one: one.peak("bf16"))

    @property
    def smallest_memory(self) -> float:
        """Bytes of the device with the least memory."""
        return min(device.memory for device in (self.device, *(device for _, device in self.others)))

    def devices(self) -> list[Device]:
        """Return one device for each rank, in order."""
        return [device for count, device in self.groups for _ in range(count)]

    def stage_ranks(self, stages: int, rank: int) -> list[Device]:
        """Return the devices of one of `stages` equal groups of consecutive ranks: those of a pipeline rank."""
        if not self.others:
            return [self.device]
        every = self.devices()
        per = len(every) // stages
        return every[rank * per : (rank + 1) * per]

    def stage_device(self, stages: int, rank: int) -> Device:
        """Return the slowest device of a pipeline rank: the others wait for it."""
        return min(self.stage_ranks(stages, rank), key=lambda one: one.peak("bf16"))

    def stage_memory(self, stages: int, rank: int) -> float:
        """Return the bytes of the smallest device of a pipeline rank."""
        return min(one.memory for one in self.stage_ranks(stages, rank))

    def resized(self, count: int) -> Cluster:
        """Return a cluster of the same devices with another count."""
        return replace(self, count=count, others=())

    def group(self, size: int, stride: int) -> tuple[Link, int]:
        """Return the link that limits a group of ranks `stride` apart, and how many of it share a node."""
        inside = max(1, min(size, self.node_size // max(stride, 1)))
        if inside >= size:
            return self.link, size
        # Every group of the node sends at once: each gets the share of its members.
        rate = min(self.link.bytes_per_second, self.network.bytes_per_second * inside)
        latency = self.network.latency
        return Link(name=self.network.name, bytes_per_second=rate, latency=latency), inside


def nodes_of(cluster: Cluster) -> int:
    """Return the number of nodes."""
    return math.ceil(cluster.count / cluster.node_size)
