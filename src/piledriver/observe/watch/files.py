"""Bounded, safe reads of files in a run folder, which may hold anything.

A path is opened only if it is a regular file and its last component is no symbolic link: a link out of the folder, a
pipe or a device is treated as missing. No function reads more than the caller asks for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def opened(path: str) -> Iterator[int | None]:
    """Open a regular file for reading and yield its descriptor; None if it is missing or something else."""
    try:
        # O_NONBLOCK: opening a pipe without a writer would wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        yield None
        return
    try:
        yield descriptor if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    finally:
        os.close(descriptor)


def read_head(path: str, limit: int) -> bytes:
    """Return the first `limit` bytes of a file, b"" if it is not a readable regular file."""
    with opened(path) as descriptor:
        return b"" if descriptor is None else _read_at(descriptor, 0, limit)


def read_tail(path: str, limit: int) -> bytes:
    """Return the last `limit` bytes of a file, b"" if it is not a readable regular file."""
    with opened(path) as descriptor:
        if descriptor is None:
            return b""
        return _read_at(descriptor, max(0, os.fstat(descriptor).st_size - limit), limit)


def status(path: str) -> tuple[int, int, int] | None:
    """Return (inode, size, time of change in ns) of a regular file, None if it is not one."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _read_at(descriptor: int, offset: int, limit: int) -> bytes:
    try:
        return os.pread(descriptor, limit, offset)
    except OSError:
        return b""
