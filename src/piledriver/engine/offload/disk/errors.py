"""Errors of the disk tier."""

from __future__ import annotations

import errno
import os

from piledriver.engine.errors import EngineError

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class DiskError(EngineError):
    """A folder of the disk tier cannot be used, or a transfer failed."""


class DiskFullError(DiskError):
    """A folder has no room for what a tier keeps in it."""


def disk_error(error: OSError, doing: str, folder: str) -> DiskError:
    """Return the error to raise where a system call on a tier's file failed; `doing` names the transfer.

    >>> disk_error(OSError(errno.EIO, "Input/output error"), "reading 4,096 bytes", "/nvme")
    DiskError('/nvme: reading 4,096 bytes failed: Input/output error. Fix: check the disk, then resume from the last checkpoint')
    """  # noqa: E501
    said = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in _FULL:
        return DiskFullError(f"{folder}: {doing} failed: {said}", fix="free space there, or use another folder")
    return DiskError(f"{folder}: {doing} failed: {said}", fix="check the disk, then resume from the last checkpoint")
