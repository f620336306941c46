"""Which process am I among all processes: one pure function from environment to a `World` value.

The world is passed, never looked up: two libraries in one process can disagree about it without harming each other, and
a test can build any world it likes. Every decision carries the reason why it was made; `piledriver env` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from piledriver.runtime import environment
from piledriver.runtime.devices import choose_device
from piledriver.runtime.errors import WorldError
from piledriver.runtime.hardware import Hardware, find_hardware
from piledriver.runtime.launchers import Place, find_place


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all processes.

    >>> World(rank=1, size=2, local_rank=1, local_size=2).is_main
    False
    """

    rank: int = 0
    """This process among all, from 0."""
    size: int = 1
    """How many processes there are on all nodes."""
    local_rank: int = 0
    """This process among those on the same node."""
    local_size: int = 1
    """How many processes this node has."""
    node: int = 0
    """This node among all nodes."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where this process computes."""
    backend: str | None = None
    """The process group's backend; None where the process is alone and needs no group."""
    launcher: str = "plain"
    """Who started us: torchrun, slurm, openmpi, mpich, environment or plain."""
    address: str | None = None
    """Where the main process listens; None where another rendezvous is used."""
    port: int | None = None
    """The port that the main process listens on."""
    debug: bool = False
    """Check before every collective that all ranks mean the same one."""
    reasons: tuple[tuple[str, str, str], ...] = field(default=(), repr=False, compare=False)
    """(what was decided, the value, why), in the order in which it was decided."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of all."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is rank 0 of this node."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the highest rank."""
        return self.rank == self.size - 1

    @property
    def is_distributed(self) -> bool:
        """Whether there is anybody to talk to."""
        return self.size > 1

    def explain(self) -> str:
        """One line per decision, with its reason."""
        width = max((len(what) for what, _, _ in self.reasons), default=0)
        return "\n".join(f"{what:<{width}}  {value}  ({why})" for what, value, why in self.reasons)

    def with_debug(self, debug: bool = True) -> World:
        """The same world, with or without checks before every collective."""
        return replace(self, debug=debug)


def detect_world(
    environ: Mapping[str, str] | None = None,
    hardware: Hardware | None = None,
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
) -> World:
    """Decide who we are from the environment and the hardware (this process's own where not given).

    >>> torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    >>> world = detect_world(torchrun, Hardware(cores=4))
    >>> world.rank, world.size, world.device.type, world.backend
    (1, 2, 'cpu', 'gloo')
    >>> print(world.explain().splitlines()[0])
    launcher    environment  (RANK and WORLD_SIZE are set)
    """
    environ = environment.snapshot() if environ is None else environ
    hardware = find_hardware() if hardware is None else hardware
    place = find_place(environ, hardware)
    _check(place)
    chosen, device_reason = choose_device(environ, hardware, place, device)
    chosen_backend, backend_reason = _choose_backend(place, chosen, backend)
    debug = environment.flag(environment.DEBUG, environ)
    reasons = [
        ("launcher", place.launcher, place.because),
        ("rank", f"{place.rank} of {place.size}", place.rank_because),
        ("local rank", f"{place.local_rank} of {place.local_size} on node {place.node}", place.local_because),
        ("device", str(chosen), device_reason),
        ("backend", chosen_backend or "none", backend_reason),
    ]
    meeting = place.meeting
    if meeting.address is not None:
        reasons.append(("rendezvous", f"{meeting.address}:{meeting.port}", meeting.because))
    if debug:
        reasons.append(("debug", "on", f"{environment.DEBUG} is set: every collective is checked first"))
    return World(
        rank=place.rank,
        size=place.size,
        local_rank=place.local_rank,
        local_size=place.local_size,
        node=place.node,
        device=chosen,
        backend=chosen_backend,
        launcher=place.launcher,
        address=meeting.address,
        port=meeting.port,
        debug=debug,
        reasons=tuple(reasons),
    )


def _check(place: Place) -> None:
    if place.size < 1:
        raise WorldError(f"the world has {place.size} processes ({place.rank_because})", fix="start at least one")
    if not 0 <= place.rank < place.size:
        raise WorldError(
            f"rank {place.rank} cannot be in a world of {place.size} ({place.rank_because})",
            fix="set the world size to the number of processes that you start, or unset both to run alone",
        )
    if not 0 <= place.local_rank < place.local_size:
        raise WorldError(
            f"local rank {place.local_rank} cannot be among {place.local_size} on this node ({place.local_because})",
            fix="set LOCAL_WORLD_SIZE to the number of processes on this node",
        )


_BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl", "xla": "xla", "cpu": "gloo", "mps": "gloo"}


def _choose_backend(place: Place, device: torch.device, wish: str | None) -> tuple[str | None, str]:
    if place.size == 1:
        return None, "one process has nobody to talk to"
    if wish is not None:
        return wish, "asked for by the caller"
    backend = _BACKENDS.get(device.type, "gloo")
    mixed = "tensors of either device can be sent" if "," in backend else f"the backend for {device.type}"
    return backend, mixed
