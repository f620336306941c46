"""Ask Linux to back memory that is read at full bandwidth by pages of 2 MiB, which need fewer address translations."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from typing import Any

HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25  # of Linux; Python's mmap does not name it


def use_huge_pages(address: int, nbytes: int, *, written: bool = True) -> None:
    """Back the memory at an address by huge pages where the system allows it; contents do not change.

    Memory that is `written` is moved at once, on Linux 6.1 or later. Memory that is not gets huge pages when it is
    first written. Whole huge pages are advised, so that arrays that lie side by side share those at their ends.
    """
    call = _madvise()
    if call is not None and nbytes >= HUGE_PAGE_BYTES:
        first = address // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        length = -(-(address + nbytes) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES - first
        for advice in (mmap.MADV_HUGEPAGE, _MADV_COLLAPSE) if written else (mmap.MADV_HUGEPAGE,):
            call(first, length, advice)  # which may fail: it is advice


@functools.cache
def _madvise() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return call
