"""Counters of the host and of this process: processor, memory, network, disk."""

from __future__ import annotations

import time


class HostCounters:
    """Reads the host's counters; rates are relative to the read before.

    Names that begin with `host/`, `network/` and `disk/` are of the whole machine, `process/` of this process.

    >>> counters = HostCounters()
    >>> counters.read()["host/rss_bytes"] > 0
    True
    """

    def __init__(self) -> None:
        import psutil

        self._psutil = psutil
        self._process = psutil.Process()
        self._last: dict[str, float] = {}
        self._read_at = time.monotonic()
        self._process.cpu_percent()  # the first call returns 0; later ones are relative to the call before
        self._busy = self._busy_seconds()

    def read(self) -> dict[str, float]:
        """Return the current values."""
        psutil, process = self._psutil, self._process
        memory = psutil.virtual_memory()
        found: dict[str, float] = {
            "host/cpu_percent": self._cpu_percent(),
            "host/available_bytes": memory.available,
            "host/used_percent": memory.percent,
        }
        with process.oneshot():
            found |= {
                "host/rss_bytes": process.memory_info().rss,
                "process/cpu_percent": process.cpu_percent(),
                "process/threads": process.num_threads(),
            }
        if hasattr(process, "num_fds"):
            found["process/open_files"] = process.num_fds()
        totals = self._totals()
        now = time.monotonic()
        elapsed = now - self._read_at
        if self._last and elapsed > 0:
            # A counter that a reset or an unplugged device made smaller gives no rate.
            found |= {
                f"{name}_per_second": max(0.0, value - self._last.get(name, value)) / elapsed
                for name, value in totals.items()
            }
        self._last, self._read_at = totals, now
        return found | totals

    def _busy_seconds(self) -> tuple[float, float]:
        """Return (busy, all) seconds of all processors since boot."""
        times = self._psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # Linux counts guests in user as well.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return total - idle, total

    def _cpu_percent(self) -> float:
        # psutil.cpu_percent() is relative to the call before of the same thread, and 0 at each thread's first.
        (busy, total), (busy_before, total_before) = self._busy_seconds(), self._busy
        self._busy = busy, total
        elapsed = total - total_before
        return min(100.0, max(0.0, 100 * (busy - busy_before) / elapsed)) if elapsed > 0 else 0.0

    def _totals(self) -> dict[str, float]:
        network, disk = self._psutil.net_io_counters(), self._psutil.disk_io_counters()
        found: dict[str, float] = {}
        if network is not None:
            found |= {"network/sent_bytes": network.bytes_sent, "network/received_bytes": network.bytes_recv}
        if disk is not None:  # absent in some containers
            found |= {"disk/read_bytes": disk.read_bytes, "disk/written_bytes": disk.write_bytes}
        return found
