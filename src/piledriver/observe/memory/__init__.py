"""Memory of this process: in use now (`use`), and at the peak of profiled steps by owner (`peak`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from piledriver.core.lazy import lazy_names

if TYPE_CHECKING:
    from piledriver.observe.memory.peak import MemoryOwner, PeakMemory
    from piledriver.observe.memory.use import MemoryUse, memory_use, readable, reset_peak

__all__ = ["MemoryOwner", "MemoryUse", "PeakMemory", "memory_use", "readable", "reset_peak"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "MemoryUse": "use",
        "MemoryOwner": "peak",
        "PeakMemory": "peak",
        "memory_use": "use",
        "readable": "use",
        "reset_peak": "use",
    },
)
