"""System monitor: a daemon thread that samples the machine every few seconds."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from piledriver.observe.memory import memory_use

_LOGGER = logging.getLogger(__name__)


class SystemMonitor:
    """Samples processor, memory, network, disk and GPU; `sink`, such as `TrackerHub.log`, receives each sample.

    >>> with SystemMonitor(every_s=60) as monitor:
    ...     sample = monitor.sample()
    >>> sample["host/rss_bytes"] > 0
    True
    """

    def __init__(
        self, *, every_s: float = 10.0, sink: Callable[[dict[str, float]], Any] | None = None, kept: int = 1000
    ) -> None:
        self._every_s = every_s
        self._sink = sink
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
        """Return the current values."""
        import psutil

        use = memory_use()
        network = psutil.net_io_counters()
        disk = psutil.disk_io_counters()
        found: dict[str, float] = {
            "host/cpu_percent": psutil.cpu_percent(),
            "host/rss_bytes": use.host_rss,
            "host/available_bytes": use.host_available,
        }
        if network is not None:
            found |= {"network/sent_bytes": network.bytes_sent, "network/received_bytes": network.bytes_recv}
        if disk is not None:
            found |= {"disk/read_bytes": disk.read_bytes, "disk/written_bytes": disk.write_bytes}
        if use.device_total:
            found |= {
                "device/allocated_bytes": use.device_allocated,
                "device/peak_bytes": use.device_peak,
                **_gpu_counters(),
            }
        return found

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


def _gpu_counters() -> dict[str, float]:
    """Return utilisation, power and temperature, if NVIDIA's library is installed."""
    import torch

    try:
        return {
            "device/utilisation_percent": float(torch.cuda.utilization()),
            "device/power_watts": torch.cuda.power_draw() / 1000,
            "device/temperature_celsius": float(torch.cuda.temperature()),
        }
    except (ImportError, RuntimeError):
        return {}
