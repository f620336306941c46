"""Sample the system and watch for leaks, on every rank, while a run trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from piledriver.observe.leaks.watch import LeakWatch
from piledriver.observe.monitor import SystemMonitor
from piledriver.observe.rank_log import RankLog
from piledriver.train.setup import RunComponents

_LOGGER = logging.getLogger(__name__)


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


@contextmanager
def leaks_watched(components: RunComponents, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Yield a function to be called after every step; rank 0 reports leaks with `say`, other ranks to their log."""
    world = components.world
    if not components.config.leaks:
        yield lambda: None
        return
    report = say if world.is_main else lambda line: _LOGGER.warning("rank %d: %s", world.rank, line)
    with LeakWatch(report=report) as watch:
        yield watch.step
