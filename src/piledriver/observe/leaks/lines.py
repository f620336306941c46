"""From the trace of an allocation to the user's line that caused it."""

from __future__ import annotations

import ctypes
import linecache
import os
import sysconfig
import tracemalloc
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

FRAMES = 16
"""Frames of an allocation that are traced: more would find the user's line below deeper libraries, and cost more."""
_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))
# CPython puts the garbage collector's header and, since 3.11, two words for the attributes in front of an object.
_HEADERS = (32, 16, 0)


class SourceLine(NamedTuple):
    """A line of a source file."""

    file: str
    number: int

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.number).strip()
        return f"{self.file}:{self.number}" + (f" `{text[:100]}`" if text else "")


def line_of(frames: Iterable[tuple[str, int]]) -> SourceLine | None:
    """Return the line to blame among the frames of an allocation, innermost first; None for those of `leaks` itself.

    The innermost line of the user's own code; without one, of this library; without that, the innermost.
    """
    ranked: tuple[int, SourceLine] | None = None
    for file, number in frames:
        rank = _rank(file)
        if rank < 0:
            return None
        if ranked is None or rank > ranked[0]:
            ranked = rank, SourceLine(file, number)
    return None if ranked is None else ranked[1]


def made_at(thing: Any) -> SourceLine | None:
    """Return the line that made an object; None if it was made before tracing began."""
    trace = tracemalloc.get_object_traceback(thing)
    if trace is not None:
        return line_of((frame.filename, frame.lineno) for frame in reversed(trace))
    found = _raw_trace(thing)
    return None if found is None else line_of(found)


def _raw_trace(thing: Any) -> tuple[tuple[str, int], ...] | None:
    # Python 3.11's get_object_traceback looks at the wrong address for objects with attributes; 3.12 does not.
    call = _traceback_by_address()
    if call is None:
        return None
    for header in _HEADERS:
        found: tuple[tuple[str, int], ...] | None = call(0, id(thing) - header)
        if found is not None:
            return found
    return None


@cache
def _traceback_by_address() -> Any:
    call: Any = getattr(ctypes.pythonapi, "_PyTraceMalloc_GetTraceback", None)
    if call is not None:
        call.restype, call.argtypes = ctypes.py_object, [ctypes.c_uint, ctypes.c_size_t]
    return call


@cache
def _packages() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple(paths[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@cache
def _rank(file: str) -> int:
    """Return 2 for the user's code, 1 for this library, 0 for other packages, -1 for this module's package."""
    path = os.path.abspath(file)
    if path.startswith(_HERE + os.sep):
        return -1
    if path.startswith(_PACKAGE + os.sep):
        return 1
    if file.startswith("<") or "site-packages" in path or path.startswith(_packages()):
        return 0
    return 2
