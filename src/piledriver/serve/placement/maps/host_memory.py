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

    free = [int(psutil.virtual_memory().available), *_left_by_limits(), *left_by_group()]
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


def left_by_group(own: str | None = None, mounted: Path = _CGROUP) -> list[int]:
    """Return what each control group of the process, and each group around it, leaves; versions 1 and 2.

    Cached files can be dropped and count as free. `own` is the text of /proc/self/cgroup.
    """
    found = []
    with contextlib.suppress(OSError):
        own = own if own is not None else Path("/proc/self/cgroup").read_text()
    for line in (own or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = mounted, ("memory.max", "memory.current", "file")
        elif "memory" in controllers.split(","):
            base, names = mounted / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")
        else:
            continue
        group = base / path.lstrip("/")
        # A container may see its own group as the root.
        for folder in dict.fromkeys((group, *group.parents, base)):
            if folder == base or base in folder.parents:
                found += _left_in(folder, *names)
    return found


def _left_in(folder: Path, limit: str, used: str, cached: str) -> list[int]:
    with contextlib.suppress(OSError, ValueError):
        # Without a limit it is "max", which is no number.
        most = int((folder / limit).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return [most - int((folder / used).read_text()) + int(counts.get(cached, 0))]
    return []
