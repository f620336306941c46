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
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


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
    """The lowest free file descriptor: it grows with the files that stay open, and costs no listing."""
    threads: int


def read_counters(step: int) -> Counters:
    """Return the counters now."""
    statm = _statm(os.getpid())
    return Counters(step, _resident(statm), _heap(), device_bytes(), _lowest_free(statm), threading.active_count())


def grew(before: Counters, now: Counters) -> bool:
    """Return whether a counter grew between two looks as fast as a leak: a reason to look more often."""
    steps = now.step - before.step
    return (
        now.files > before.files
        or now.threads > before.threads
        or max(now.heap - before.heap, now.device - before.device) >= steps * BYTES_PER_STEP
        or now.resident - before.resident >= steps * _RESIDENT_PER_STEP
    )


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

    def __bool__(self) -> bool:
        return bool(self._samples)

    @property
    def is_full(self) -> bool:
        """Whether there are enough samples to tell."""
        return len(self._samples) == _SAMPLES

    def growing(self) -> set[str]:
        """Return the counters that may be leaking: a suspicion that costs a look, not a verdict."""
        if not self.is_full:
            return set()
        return {name for name in Counters._fields[1:] if self._grows(name)}

    def per_step(self, name: str) -> float:
        """Return the mean growth of a counter per step; 0 without two samples."""
        if len(self._samples) < 2:
            return 0.0
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


@cache
def _statm(process: int) -> int | None:
    """Return a descriptor of a process's sizes, which stays open: opening it at each look would cost more."""
    try:
        return os.open(f"/proc/{process}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _resident(statm: int | None) -> int:
    if statm is not None:
        return int(os.pread(statm, 256, 0).split()[1]) * _PAGE
    import psutil

    return int(psutil.Process().memory_info().rss)


def _lowest_free(statm: int | None) -> int:
    if statm is None:
        return 0
    found = os.dup(statm)
    os.close(found)
    return found


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


def device_bytes() -> int:
    """Return the bytes of tensors on the CUDA device."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    return int(torch.cuda.memory_allocated())
