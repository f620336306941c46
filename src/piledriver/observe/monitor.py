"""System monitor: a daemon thread that samples the machine every few seconds."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from piledriver.observe.system.device import DeviceCounters
from piledriver.observe.system.host import HostCounters
from piledriver.observe.system.rapl import RaplEnergy

_LOGGER = logging.getLogger(__name__)


class SystemMonitor:
    """Samples processor, memory, network, disk, GPU and energy of one rank.

    `sink`, such as `TrackerHub.log`, receives each sample. `device` is the index of the rank's GPU; default: torch's
    current device at the first sample.

    >>> with SystemMonitor(every_s=60) as monitor:
    ...     sample = monitor.sample()
    >>> sample["host/rss_bytes"] > 0
    True
    """

    def __init__(
        self,
        *,
        every_s: float = 10.0,
        sink: Callable[[dict[str, float]], Any] | None = None,
        kept: int = 1000,
        device: int | None = None,
    ) -> None:
        self._every_s = every_s
        self._sink = sink
        self._host = HostCounters()
        self._device = DeviceCounters(device)
        self._energy = RaplEnergy()
        self._stop = threading.Event()
        weakref.finalize(self, self._stop.set)
        self._thread: threading.Thread | None = None
        self._failed = False
        self.history: deque[dict[str, float]] = deque(maxlen=kept)

    def start(self) -> SystemMonitor:
        """Start the thread."""
        if self._thread is None:
            self._stop.clear()
            # A weak reference: a monitor that is collected without `stop` ends its thread.
            arguments = (weakref.ref(self), self._stop, self._every_s)
            self._thread = threading.Thread(target=_watch, args=arguments, name="system-monitor", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> None:
        """Stop the thread; `history` keeps the samples."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None

    def __enter__(self) -> SystemMonitor:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def sample(self) -> dict[str, float]:
        """Return the current values; rates are relative to the sample before."""
        found = self._host.read() | self._device.read()
        joules = self._energy.read()
        return found if joules is None else found | {"host/energy_joules": joules}

    def look(self) -> None:
        """Take a sample, append it to `history` and pass it to `sink`."""
        try:
            sample = self.sample()
            self.history.append(sample)
            if self._sink is not None:
                self._sink(sample)
        except Exception as error:  # the monitor must not end the run
            if not self._failed:
                _LOGGER.warning("system monitor: a sample failed: %s: %s", type(error).__name__, error)
            self._failed = True


def _watch(held: weakref.ref[SystemMonitor], stop: threading.Event, every_s: float) -> None:
    while not stop.wait(every_s):
        monitor = held()
        if monitor is None:
            return
        monitor.look()
        del monitor
