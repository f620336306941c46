"""Energy of the host's processors and memory, from the kernel's powercap interface (RAPL)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_ROOT = "/sys/class/powercap"


class RaplEnergy:
    """Energy since construction. Most kernels let only root read the counters; without them, `read` returns None."""

    def __init__(self, root: str | Path = _ROOT) -> None:
        self._joules = 0.0
        self._zones: list[tuple[Path, int]] = []
        # intel-rapl:0 is a package; intel-rapl:0:0 (cores, memory) is part of it and would be counted twice.
        for zone in sorted(Path(root).glob("*-rapl:*")):
            if zone.name.count(":") != 1 or zone.name.startswith("intel-rapl-mmio"):
                continue
            with suppress(OSError, ValueError):
                wraps_at = int((zone / "max_energy_range_uj").read_text())
                int((zone / "energy_uj").read_text())
                self._zones.append((zone / "energy_uj", wraps_at))
        self._last = self._counters()

    def read(self) -> float | None:
        """Return joules since construction, None where the counters cannot be read."""
        if not self._zones:
            return None
        now = self._counters()
        for (_, wraps_at), before, after in zip(self._zones, self._last, now, strict=True):
            self._joules += (after - before if after >= before else after + wraps_at - before) / 1e6
        self._last = now
        return self._joules

    def _counters(self) -> list[int]:
        return [int(path.read_text()) for path, _ in self._zones]
