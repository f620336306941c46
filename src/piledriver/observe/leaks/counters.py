"""Cheap counters of what may leak, and the question whether one of them grows steadily."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

BYTES_PER_STEP = 64 << 10
"""Smallest growth of memory that counts as a leak."""
# The size of a process is a rougher measure than what its allocators report.
_RESIDENT_PER_STEP = 4 * BYTES_PER_STEP
_SAMPLES = 5


class Counters(NamedTuple):
    """Counters of this process after a step."""

    step: int
    resident: int
    """Bytes of the process in memory."""
    heap: int
    """Bytes that the C allocator has handed out; 0 where it does not tell."""
    device: int
    """Bytes of tensors on the CUDA device."""
    files: int
    threads: int


def read_counters(step: int) -> Counters:
    """Return the counters now; microseconds."""
    return Counters(step, _resident(), _heap(), _device(), open_files(), threading.active_count())


def open_files() -> int:
    """Return the number of open file descriptors, 0 where the system does not tell."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


class Trend:
    """The latest samples, and what grew in them."""

    def __init__(self) -> None:
        self._samples: deque[Counters] = deque(maxlen=_SAMPLES)

    def add(self, sample: Counters) -> None:
        """Add a sample."""
        self._samples.append(sample)

    def clear(self) -> None:
        """Forget the samples."""
        self._samples.clear()

    def growing(self) -> set[str]:
        """Return the counters that may be leaking: a suspicion that costs a look, not a verdict."""
        if len(self._samples) < _SAMPLES:
            return set()
        return {name for name in Counters._fields[1:] if self._grows(name)}

    def per_step(self, name: str) -> float:
        """Return the mean growth of a counter per step."""
        first, last = self._samples[0], self._samples[-1]
        return float(getattr(last, name) - getattr(first, name)) / max(1, last.step - first.step)

    def _grows(self, name: str) -> bool:
        values = [getattr(sample, name) for sample in self._samples]
        changes = [after - before for before, after in pairwise(values)]
        if name in ("files", "threads"):
            return all(change > 0 for change in changes)
        # The first steps, a validation and the allocators' pools grow in jumps; a leak grows about evenly.
        least = _RESIDENT_PER_STEP if name == "resident" else BYTES_PER_STEP
        even = sorted(changes)[1] >= sum(changes) / len(changes) / 4
        return even and self.per_step(name) >= least


def _resident() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keep",
        )
    )


@cache
def _mallinfo() -> Any:
    call: Any = getattr(ctypes.CDLL(None), "mallinfo2", None) if os.name == "posix" else None
    if call is not None:
        call.restype = _MallocInfo
    return call


def _heap() -> int:
    call = _mallinfo()
    if call is None:
        return 0
    found = call()
    return int(found.uordblks + found.hblkhd)


def _device() -> int:
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return int(torch.cuda.memory_allocated())
