"""Processes find each other: from a `World` value to a working process group, or to an error that says who is missing.

Before torch's process group is made, all ranks call the roll over the store: rank 0 checks that everybody came and that
everybody counts the same number of processes, then tells the verdict to all. So a wrong world size or a process that
never started is one clear error on every rank instead of a hang.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from piledriver.runtime import environment
from piledriver.runtime.errors import PortTakenError, RendezvousError, WorldError
from piledriver.runtime.stores import FileStore, PrefixStore, Store, TCPStore
from piledriver.runtime.world import World

ROLL_CALL_SECONDS = 300.0
READING_SECONDS = 10.0


def connect(world: World, *, timeout: timedelta | None = None, roll_call: timedelta | None = None) -> None:
    """Make the default process group of this world; nothing to do where there is one process or it is made already.

    `timeout` is how long a collective may wait for a peer (torch's default where None); `roll_call` is how long the
    processes may take to find each other.
    """
    _take_device(world)
    if not world.is_distributed:
        return
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
            raise WorldError(
                f"a process group exists with rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"but the environment says rank {world.rank} of {world.size}",
                fix="call torch.distributed.destroy_process_group() first, or start from the same environment",
            )
        return
    patience = roll_call or timedelta(seconds=ROLL_CALL_SECONDS)
    store = _open_store(world, patience)
    _call_roll(world, PrefixStore("piledriver/roll_call", store), patience)
    device = world.device if world.device.type == "cuda" else None
    try:
        dist.init_process_group(
            world.backend, store=store, rank=world.rank, world_size=world.size, device_id=device, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {world.rank}: the {world.backend!r} process group could not be made: {_first_line(error)}",
            fix="check that every node can reach every other on its default interface (GLOO_SOCKET_IFNAME chooses one)",
        ) from error


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def is_connected() -> bool:
    """Whether this process is in a process group."""
    return dist.is_available() and dist.is_initialized()


def _take_device(world: World) -> None:
    if world.device.type in ("cuda", "xpu") and world.device.index is not None:
        getattr(torch, world.device.type).set_device(world.device)


def _open_store(world: World, patience: timedelta) -> Store:
    environ = environment.snapshot()
    file = environ.get(environment.RENDEZVOUS_FILE)
    if file is not None:
        return FileStore(file, world.size)
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    assert world.address is not None
    assert world.port is not None
    # Under torchrun the agent's own store is already listening; otherwise rank 0 listens.
    agent_listens = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = world.is_main and not agent_listens
    try:
        # Each attempt has its own corner of the store, so that a restarted world never reads the keys of a dead one.
        store = TCPStore(world.address, world.port, world.size, listens, timeout=patience, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        if listens and _port_is_taken(world.port):
            raise PortTakenError(
                f"port {world.port} on this machine is in use by another program",
                fix="set MASTER_PORT to a free one (piledriver launch finds one by itself)",
            ) from error
        raise RendezvousError(
            f"rank {world.rank} could not reach the main process at {world.address}:{world.port} "
            f"within {patience.total_seconds():.0f} s: {_first_line(error)}",
            fix="check that rank 0 runs there and that no firewall is between",
        ) from error
    return PrefixStore(f"piledriver/attempt_{attempt}", store)


def _call_roll(world: World, store: Store, patience: timedelta) -> None:
    entry = {"size": world.size, "host": socket.gethostname()}
    if store.add(f"seen/{world.rank}", 1) > 1:
        raise WorldError(f"two processes say that they are rank {world.rank}", fix="give every process its own RANK")
    store.set(f"entry/{world.rank}", json.dumps(entry))
    if world.is_main:
        verdict = _verdict(world, store, patience)
        store.set("verdict", json.dumps(verdict))
    else:
        try:
            store.wait(["verdict"], patience + timedelta(seconds=10))
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {world.rank} heard nothing from rank 0 within {patience.total_seconds():.0f} s",
                fix="look at the log of rank 0",
            ) from error
        verdict = json.loads(store.get("verdict"))
    store.set(f"read/{world.rank}", "")
    if verdict["error"] is not None:
        if world.is_main:
            _wait_for_readers(world, store)
        raise RendezvousError(verdict["error"], fix=verdict["fix"])


def _wait_for_readers(world: World, store: Store) -> None:
    """Rank 0 may serve the store: it must not leave before all who came have read why."""
    came = [rank for rank in range(world.size) if store.check([f"entry/{rank}"])]
    with suppress(RuntimeError):
        store.wait([f"read/{rank}" for rank in came], timedelta(seconds=READING_SECONDS))


def _verdict(world: World, store: Store, patience: timedelta) -> dict[str, str | None]:
    keys = [f"entry/{rank}" for rank in range(world.size)]
    with suppress(RuntimeError):
        store.wait(keys, patience)
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if missing:
        return {
            "error": f"{len(missing)} of {world.size} processes did not come within {patience.total_seconds():.0f} s: "
            f"rank {name_ranks(missing)}",
            "fix": "start them, or set WORLD_SIZE to the number that you start",
        }
    entries = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys)}
    odd = {rank: entry for rank, entry in entries.items() if entry["size"] != world.size}
    if odd:
        said = ", ".join(f"rank {rank} on {entry['host']} says {entry['size']}" for rank, entry in odd.items())
        return {
            "error": f"the processes disagree on the size of the world: rank 0 says {world.size}, {said}",
            "fix": "start all of them with the same WORLD_SIZE",
        }
    return {"error": None, "fix": None}


def name_ranks(ranks: list[int], most: int = 8) -> str:
    """Ranks for a message, not more than a reader wants to see.

    >>> name_ranks([1, 2]), name_ranks(list(range(100)), most=2)
    ('1, 2', '0, 1 and 98 more')
    """
    shown = ", ".join(map(str, ranks[:most]))
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"


def _port_is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
