"""Sample the system on every rank while a run trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from piledriver.observe.monitor import SystemMonitor
from piledriver.observe.rank_log import RankLog
from piledriver.train.setup import RunComponents


@contextmanager
def monitored(components: RunComponents) -> Iterator[RankLog]:
    """Run a system monitor on this rank that writes into the run folder; the last sample is taken at the end."""
    world, every_s = components.world, components.config.monitor_seconds
    ranks = RankLog(components.config.out, world.rank, world.size)
    if not every_s:
        yield ranks
        return
    with SystemMonitor(every_s=every_s, sink=ranks, kept=1, device=components.device.index) as monitor:
        try:
            yield ranks
        finally:
            monitor.look()
