"""`World`: this process among all processes, detected by a pure function of environment and hardware.

The world is passed as a value and never a global, so that a test can build any world. Every decision is recorded with
its reason; `piledriver env` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from piledriver.runtime import environment
from piledriver.runtime.detect_launcher import RankInfo, detect_launcher
from piledriver.runtime.devices import choose_device
from piledriver.runtime.errors import WorldError
from piledriver.runtime.hardware import Hardware, find_hardware


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all processes.

    >>> World(rank=1, size=2, local_rank=1, local_size=2).is_main
    False
    """

    rank: int = 0
    """Rank of this process."""
    size: int = 1
    """World size: processes on all nodes."""
    local_rank: int = 0
    """Rank of this process on its node."""
    local_size: int = 1
    """Processes on this node."""
    node: int = 0
    """Rank of this node."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device of this process."""
    backend: str | None = None
    """Backend of the process group; None for a single process."""
    launcher: str = "plain"
    """What started this process: torchrun, slurm, openmpi, mpich, environment or plain."""
    address: str | None = None
    """Address of the rendezvous; None if processes meet through a file or another store."""
    port: int | None = None
    """Port of the rendezvous."""
    debug: bool = False
    """Verify before every collective that all ranks call the same one."""
    reasons: tuple[tuple[str, str, str], ...] = field(default=(), repr=False, compare=False)
    """(what, value, reason) of each decision, in order."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is local rank 0."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the highest rank."""
        return self.rank == self.size - 1

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.size > 1

    def explain(self) -> str:
        """Return one line per decision, with its reason."""
        width = max((len(what) for what, _, _ in self.reasons), default=0)
        return "\n".join(f"{what:<{width}}  {value}  ({why})" for what, value, why in self.reasons)

    def with_debug(self, debug: bool = True) -> World:
        """Return the same world with or without checks before every collective."""
        return replace(self, debug=debug)


def current_world(*, device: str | torch.device | None = None, backend: str | None = None) -> World:
    """Return the detected world, or that of the process group if a script connected its processes itself.

    Such a script (with `torch.multiprocessing.spawn`, say) sets no launcher's environment variables; without this rule
    each of its processes would run alone.
    """
    found = detect_world(device=device, backend=backend)
    if found.is_distributed or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return found
    chosen = found.device
    if chosen.type == "cuda" and device is None:
        chosen = torch.device("cuda", torch.cuda.current_device())
    note = ("process group", f"rank {dist.get_rank()} of {dist.get_world_size()}", "the script created it")
    return replace(group_world(chosen), debug=found.debug, reasons=(*found.reasons, note))


def group_world(device: torch.device | str = "cpu") -> World:
    """Return the `World` of the connected process group, or that of a single process."""
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank=rank, size=size, device=torch.device(device), backend=dist.get_backend())


def detect_world(
    environ: Mapping[str, str] | None = None,
    hardware: Hardware | None = None,
    *,
    device: str | torch.device | None = None,
    backend: str | None = None,
) -> World:
    """Return the world that environment and hardware describe (default: those of this process).

    >>> torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    >>> world = detect_world(torchrun, Hardware(cores=4))
    >>> world.rank, world.size, world.device.type, world.backend
    (1, 2, 'cpu', 'gloo')
    >>> print(world.explain().splitlines()[0])
    launcher    environment  (RANK and WORLD_SIZE are set)
    """
    environ = environment.snapshot() if environ is None else environ
    hardware = find_hardware() if hardware is None else hardware
    found = detect_launcher(environ, hardware)
    _check(found)
    chosen, device_reason = choose_device(environ, hardware, found, device)
    chosen_backend, backend_reason = _choose_backend(found, chosen, backend)
    debug = environment.flag(environment.DEBUG, environ)
    reasons = [
        ("launcher", found.launcher, found.launcher_reason),
        ("rank", f"{found.rank} of {found.size}", found.rank_reason),
        ("local rank", f"{found.local_rank} of {found.local_size} on node {found.node}", found.local_reason),
        ("device", str(chosen), device_reason),
        ("backend", chosen_backend or "none", backend_reason),
    ]
    rendezvous = found.rendezvous
    if rendezvous.address is not None:
        reasons.append(("rendezvous", f"{rendezvous.address}:{rendezvous.port}", rendezvous.reason))
    if debug:
        reasons.append(("debug", "on", f"{environment.DEBUG} is set: every collective is verified first"))
    return World(
        rank=found.rank,
        size=found.size,
        local_rank=found.local_rank,
        local_size=found.local_size,
        node=found.node,
        device=chosen,
        backend=chosen_backend,
        launcher=found.launcher,
        address=rendezvous.address,
        port=rendezvous.port,
        debug=debug,
        reasons=tuple(reasons),
    )


def _check(found: RankInfo) -> None:
    if found.size < 1:
        raise WorldError(f"world size is {found.size} ({found.rank_reason})", fix="start at least one process")
    if not 0 <= found.rank < found.size:
        raise WorldError(
            f"rank {found.rank} is not below the world size {found.size} ({found.rank_reason})",
            fix="set the world size to the number of processes that you start, or unset both to run one process",
        )
    if not 0 <= found.local_rank < found.local_size:
        raise WorldError(
            f"local rank {found.local_rank} is not below LOCAL_WORLD_SIZE {found.local_size} ({found.local_reason})",
            fix="set LOCAL_WORLD_SIZE to the number of processes on this node",
        )


_BACKENDS = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl", "xla": "xla", "cpu": "gloo", "mps": "gloo"}


def _choose_backend(found: RankInfo, device: torch.device, wish: str | None) -> tuple[str | None, str]:
    if found.size == 1:
        return None, "a single process needs none"
    if wish is not None:
        return wish, "given by the caller"
    backend = _BACKENDS.get(device.type, "gloo")
    mixed = "sends tensors of either device" if "," in backend else f"the backend for {device.type}"
    return backend, mixed
