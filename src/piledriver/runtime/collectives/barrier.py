"""Wait for everyone, and say who is late.

The barrier goes over the store and not over a collective, so that it works for every backend and can name the ranks
that did not come. The store keeps the count of barriers per rank: no state in this process could go wrong.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from piledriver.runtime.connection import name_ranks
from piledriver.runtime.errors import LateRankError, LostPeerError
from piledriver.runtime.stores import PrefixStore, Store
from piledriver.runtime.world import World

BARRIER_SECONDS = 1800.0
PATIENCE_SECONDS = 30.0

_log = logging.getLogger(__name__)


def barrier(world: World, *, timeout: timedelta | None = None, name: str = "barrier") -> None:
    """Return when every rank has called this; after `timeout` raise `LateRankError` with the ranks that have not.

    A wait longer than half a minute is logged with the names of the late, so that a slow rank is seen before it is too
    late.
    """
    if not world.is_distributed:
        return
    if world.device.type == "cuda":
        # Work that was queued before the barrier must be done before it, as with a collective on the device.
        torch.cuda.current_stream(world.device).synchronize()
    store = PrefixStore("piledriver/barrier", _default_store())
    limit = timeout.total_seconds() if timeout is not None else BARRIER_SECONDS
    try:
        turn = store.add(f"turn/{world.rank}", 1)
        if store.add(f"{turn}/arrived", 1) == world.size:
            store.set(f"{turn}/open", name)
            if turn > 1:
                # Everybody is here, so nobody still waits for the door before this one.
                store.delete_key(f"{turn - 1}/open")
                store.delete_key(f"{turn - 1}/arrived")
        else:
            _wait_for_door(world, store, turn, limit, name)
    except dist.DistError as error:
        raise LostPeerError(
            f"rank {world.rank} lost the main process while waiting at {name!r}: {str(error).splitlines()[0]}",
            fix="look at the log of rank 0, which served the store",
        ) from error


def late_ranks(world: World, store: Store, turn: int) -> list[int]:
    """The ranks that have not come to barrier number `turn`."""
    return [rank for rank in range(world.size) if store.add(f"turn/{rank}", 0) < turn]


def _wait_for_door(world: World, store: Store, turn: int, limit: float, name: str) -> None:
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        try:
            store.wait([f"{turn}/open"], timedelta(seconds=max(0.001, min(limit - waited, PATIENCE_SECONDS))))
            return
        except RuntimeError as error:
            # A store in a file says so with a plain RuntimeError, one behind a socket with a subclass.
            if isinstance(error, dist.DistNetworkError):
                raise
            waited = time.monotonic() - start
            late = late_ranks(world, store, turn)
            if not late:
                # The last one came between the wait and the look.
                continue
            if waited >= limit:
                raise LateRankError(
                    f"rank {world.rank} waited {waited:.1f} s at {name!r} for rank {name_ranks(late)}",
                    fix="look at the log of the late rank; give a longer timeout if it is only slow",
                ) from None
            _log.warning("rank %d has waited %.0f s at %r for rank %s", world.rank, waited, name, name_ranks(late))


def _default_store() -> Store:
    # The one private name of torch in this room: there is no public way to the store of the default group.
    store: Store = dist.distributed_c10d._get_default_store()
    return store
