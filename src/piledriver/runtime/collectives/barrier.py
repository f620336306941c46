"""Barrier that names late ranks.

It uses the store and not a collective, so that it works with every backend and can name the ranks that are missing. The
store counts the barriers of each rank: this process keeps no state.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from piledriver.runtime.connection import name_ranks
from piledriver.runtime.errors import LateRankError, LostPeerError
from piledriver.runtime.torch_private import PrefixStore, Store, default_store
from piledriver.runtime.world import World

BARRIER_SECONDS = 1800.0
WARNING_SECONDS = 30.0

_log = logging.getLogger(__name__)


def barrier(world: World, *, timeout: timedelta | None = None, name: str = "barrier") -> None:
    """Return when every rank has called this; after `timeout` raise `LateRankError` with the ranks that have not.

    Every 30 seconds the ranks that are still missing are logged as a warning.
    """
    if not world.is_distributed:
        return
    if world.device.type == "cuda":
        # Work that was queued before the barrier must be finished, as with a collective on the device.
        torch.cuda.current_stream(world.device).synchronize()
    store = PrefixStore("piledriver/barrier", default_store())
    limit = timeout.total_seconds() if timeout is not None else BARRIER_SECONDS
    try:
        turn = store.add(f"turn/{world.rank}", 1)
        if store.add(f"{turn}/arrived", 1) == world.size:
            store.set(f"{turn}/open", name)
            if turn > 1:
                # All ranks have arrived, so none still waits at the barrier before this one.
                store.delete_key(f"{turn - 1}/open")
                store.delete_key(f"{turn - 1}/arrived")
        else:
            _wait_until_open(world, store, turn, limit, name)
    except dist.DistError as error:
        raise LostPeerError(
            f"rank {world.rank} lost the main process while waiting at {name!r}: {str(error).splitlines()[0]}",
            fix="read the log of rank 0, which served the store",
        ) from error


def late_ranks(world: World, store: Store, turn: int) -> list[int]:
    """Return the ranks that have not reached barrier number `turn`."""
    return [rank for rank in range(world.size) if store.add(f"turn/{rank}", 0) < turn]


def _wait_until_open(world: World, store: Store, turn: int, limit: float, name: str) -> None:
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        try:
            store.wait([f"{turn}/open"], timedelta(seconds=max(0.001, min(limit - waited, WARNING_SECONDS))))
            return
        except RuntimeError as error:
            # A file store times out with a plain RuntimeError, a TCP store with a subclass.
            if isinstance(error, dist.DistNetworkError):
                raise
            waited = time.monotonic() - start
            late = late_ranks(world, store, turn)
            if not late:
                # The last rank arrived after the wait timed out.
                continue
            if waited >= limit:
                raise LateRankError(
                    f"rank {world.rank} waited {waited:.1f} s at {name!r} for rank {name_ranks(late)}",
                    fix="read the log of the late rank; raise the timeout if it is only slow",
                ) from None
            _log.warning("rank %d has waited %.0f s at %r for rank %s", world.rank, waited, name, name_ranks(late))
