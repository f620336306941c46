"""Ask the kernel how much of a file is in the page cache (`cachestat`, Linux 6.5): a copy of it beats another read."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from piledriver.engine.offload.disk.host_buffer import PAGE_BYTES

_CACHESTAT = 451
"""The number of the system call on all architectures; the C library has no function for it."""
_ALMOST_ALL = 15 / 16


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "in_writeback", "evicted", "recently_evicted")
    )


def is_cached(descriptor: int, offset: int, nbytes: int) -> bool:
    """Whether almost all of a part of a file is in the page cache; False where the kernel does not tell."""
    call, part, counts = _call(), _Range(offset, nbytes), _Counts()
    if call is None or call(_CACHESTAT, descriptor, ctypes.byref(part), ctypes.byref(counts), 0) != 0:
        return False
    return bool(counts.cached * PAGE_BYTES >= _ALMOST_ALL * nbytes)


@cache
def _call() -> Any:
    return ctypes.CDLL(None).syscall if sys.platform == "linux" else None
