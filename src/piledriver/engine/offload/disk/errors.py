"""Errors of the disk tier."""

from __future__ import annotations

import errno
import os

from piledriver.core.errors import StorageError
from piledriver.engine.errors import EngineError

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class DiskError(EngineError, StorageError):
    """A file or folder of the disk tier cannot be used, or a transfer failed."""


class DiskFullError(DiskError):
    """A folder has no room for what a tier keeps in it."""


def disk_error(error: OSError, doing: str, name: str) -> DiskError:
    """Return the error to raise where a system call on a file (or folder) `name` failed; `doing` is the transfer.

    >>> disk_error(OSError(errno.EIO, "Input/output error"), "reading 4,096 bytes", "/nvme")
    DiskError('/nvme: reading 4,096 bytes failed: Input/output error. Fix: check the disk, then resume from the last checkpoint')
    """  # noqa: E501
    said = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _FULL:
        return DiskFullError(f"{name}: {doing} failed: {said}", fix="free space there, or use another folder")
    return DiskError(f"{name}: {doing} failed: {said}", fix="check the disk, then resume from the last checkpoint")
