"""Host memory that this process may still take: what the machine has free, within the limits set on the process."""

from __future__ import annotations

import contextlib
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_host_memory() -> int:
    """Return bytes: the least of free memory, the control group's limit and the limits of the process.

    >>> available_host_memory() > 0
    True
    """
    import psutil

    free = [int(psutil.virtual_memory().available), *_left_by_limits(), *_left_by_group()]
    return max(min(free), 0)


def _left_by_limits() -> list[int]:
    with contextlib.suppress(ImportError, OSError):
        import resource

        status = dict(
            line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Vm")
        )
        taken = {name: int(status[name].split()[0]) * 1024 for name in ("VmSize", "VmData")}
        limits = (("VmSize", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA))
        soft = [(name, resource.getrlimit(kind)[0]) for name, kind in limits]
        return [limit - taken[name] for name, limit in soft if limit != resource.RLIM_INFINITY]
    return []


def _left_by_group() -> list[int]:
    """Return what the control group (version 2) leaves; its cached files can be dropped and count as free."""
    with contextlib.suppress(OSError, ValueError):
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        for folder in (_CGROUP / own, _CGROUP):
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / "memory.current").read_text()) - int(counts.get("file", 0))
                return [int(limit) - used]
    return []
