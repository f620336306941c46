"""Connect the processes of a `World` to a process group, or raise an error that names the missing ranks.

Before the process group is created, every rank checks in through the store. Rank 0 verifies that all ranks are there
and have the same world size, and publishes the result. A wrong world size or a process that never started is therefore
an error on every rank instead of a hang.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from piledriver.runtime import environment
from piledriver.runtime.errors import PortTakenError, RendezvousError, WorldError
from piledriver.runtime.torch_private import FileStore, PrefixStore, Store, TCPStore
from piledriver.runtime.world import World

RENDEZVOUS_SECONDS = 300.0
READ_RESULT_SECONDS = 10.0


def connect(world: World, *, timeout: timedelta | None = None, rendezvous_timeout: timedelta | None = None) -> None:
    """Create the default process group of a world, unless it exists or there is a single process.

    `timeout` is that of collectives (default: torch's), `rendezvous_timeout` that of connecting.
    """
    _set_device(world)
    if not world.is_distributed:
        return
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.size):
            raise WorldError(
                f"a process group exists with rank {dist.get_rank()} of {dist.get_world_size()}, "
                f"but the world has rank {world.rank} of {world.size}",
                fix="call torch.distributed.destroy_process_group() first, or start from the same environment",
            )
        return
    patience = rendezvous_timeout or timedelta(seconds=RENDEZVOUS_SECONDS)
    store = _open_store(world, patience)
    _check_in(world, PrefixStore("piledriver/check_in", store), patience)
    device = world.device if world.device.type == "cuda" else None
    try:
        dist.init_process_group(
            world.backend, store=store, rank=world.rank, world_size=world.size, device_id=device, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {world.rank}: the {world.backend!r} process group could not be created: {_first_line(error)}",
            fix="check that every node can reach every other on its default interface (GLOO_SOCKET_IFNAME chooses one)",
        ) from error


def resolve_host(host: str, patience_seconds: float) -> None:
    """Wait until a host name resolves, which may take a moment where names are assigned with the job.

    Raises `RendezvousError` after at most 20 seconds; torch would retry for minutes and print frames of C++.
    """
    deadline = time.monotonic() + min(patience_seconds, 20.0)
    while True:
        try:
            socket.getaddrinfo(host.strip("[]"), None)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"the host {host!r} cannot be resolved: {error.strerror or error}",
                    fix="check the rendezvous endpoint (MASTER_ADDR, --rdzv-endpoint), or use an IP address",
                ) from error
        time.sleep(0.5)


def disconnect() -> None:
    """Destroy the default process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _set_device(world: World) -> None:
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
    # Under torchrun the agent serves the store; otherwise rank 0 does.
    agent_listens = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    listens = world.is_main and not agent_listens
    resolve_host(world.address, patience.total_seconds())
    try:
        # Each attempt has its own prefix, so that restarted processes never read keys of an earlier attempt.
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
            fix="check that rank 0 runs there and that no firewall blocks the port",
        ) from error
    return PrefixStore(f"piledriver/attempt_{attempt}", store)


def _check_in(world: World, store: Store, patience: timedelta) -> None:
    entry = {"size": world.size, "host": socket.gethostname()}
    if store.add(f"seen/{world.rank}", 1) > 1:
        raise WorldError(f"two processes have rank {world.rank}", fix="give every process its own RANK")
    store.set(f"entry/{world.rank}", json.dumps(entry))
    if world.is_main:
        result = _result(world, store, patience)
        store.set("result", json.dumps(result))
    else:
        try:
            store.wait(["result"], patience + timedelta(seconds=10))
        except RuntimeError as error:
            raise RendezvousError(
                f"rank {world.rank} got no answer from rank 0 within {patience.total_seconds():.0f} s",
                fix="read the log of rank 0",
            ) from error
        result = json.loads(store.get("result"))
    store.set(f"read/{world.rank}", "")
    if result["error"] is not None:
        if world.is_main:
            _wait_for_readers(world, store)
        raise RendezvousError(result["error"], fix=result["fix"])


def _wait_for_readers(world: World, store: Store) -> None:
    """Keep rank 0, which may serve the store, until every rank that checked in has read the result."""
    present = [rank for rank in range(world.size) if store.check([f"entry/{rank}"])]
    with suppress(RuntimeError):
        store.wait([f"read/{rank}" for rank in present], timedelta(seconds=READ_RESULT_SECONDS))


def _result(world: World, store: Store, patience: timedelta) -> dict[str, str | None]:
    keys = [f"entry/{rank}" for rank in range(world.size)]
    with suppress(RuntimeError):
        store.wait(keys, patience)
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    if missing:
        return {
            "error": f"{len(missing)} of {world.size} ranks did not connect within {patience.total_seconds():.0f} s: "
            f"rank {name_ranks(missing)}",
            "fix": "start them, or set WORLD_SIZE to the number of processes that you start",
        }
    entries = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys)}
    odd = {rank: entry for rank, entry in entries.items() if entry["size"] != world.size}
    if odd:
        said = ", ".join(f"rank {rank} on {entry['host']} has {entry['size']}" for rank, entry in odd.items())
        return {
            "error": f"world sizes differ: rank 0 has {world.size}, {said}",
            "fix": "start all processes with the same WORLD_SIZE",
        }
    return {"error": None, "fix": None}


def name_ranks(ranks: list[int], most: int = 8) -> str:
    """Return ranks for a message, at most `most` of them.

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
