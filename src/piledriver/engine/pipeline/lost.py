"""Which rank is gone, when a pipeline breaks: the survivors call the roll over the store.

A rank that loses its neighbour leaves the group, so that those who wait for it fail too instead of waiting for the
timeout; then everybody who is left signs the roll, and whoever has not signed is named.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from piledriver.runtime.collectives import is_lost_peer
from piledriver.runtime.errors import LostPeerError

ROLL_SECONDS = 5.0
"""How long to wait for signatures where several ranks have not signed."""
LEAST_SECONDS = 1.0
"""How long to wait at least: those who only now fail are alive."""


@contextmanager
def naming_the_lost(pp: DeviceMesh, doing: str) -> Iterator[None]:
    """Turn torch's errors about a lost connection into one that names the rank."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not is_lost_peer(cause):
            cause = cause.__cause__
        if cause is None:
            raise
        missing = _call_the_roll(pp)
        who = f"rank {', '.join(map(str, missing))} of its pipeline" if missing else "another rank"
        raise LostPeerError(
            f"rank {dist.get_rank()}: {doing} stopped because {who} is gone: {next(iter(str(cause).splitlines()), '')}",
            fix="look at that rank's log; raise the timeout if it was only slow",
        ) from error


def _call_the_roll(pp: DeviceMesh) -> list[int]:
    """The ranks of this pipeline that do not answer."""
    group = pp.get_group()
    ranks = dist.get_process_group_ranks(group)
    # torch has no public way to the store, nor to break off a group's connections.
    store = dist.distributed_c10d._get_default_store()
    prefix = f"piledriver/pipeline/lost/{'-'.join(map(str, ranks))}"
    try:
        store.set(f"{prefix}/{dist.get_rank()}", "here")
        with suppress(RuntimeError):
            group.abort()
        start = time.monotonic()
        while True:
            missing = [rank for rank in ranks if not store.check([f"{prefix}/{rank}"])]
            waited = time.monotonic() - start
            if waited > (LEAST_SECONDS if len(missing) <= 1 else ROLL_SECONDS):
                return missing
            time.sleep(0.05)
    except (dist.DistError, RuntimeError):
        # Rank 0 serves the store: with it gone, nobody answers.
        return [0] if 0 in ranks and dist.get_rank() != 0 else []
