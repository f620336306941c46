"""The raw rate of a folder, and a warning where transfers fall far behind it."""

from __future__ import annotations

import logging
import time

import torch

from piledriver.engine.offload.disk.block_file import DiskStore
from piledriver.engine.offload.disk.direct_io import DiskRate
from piledriver.engine.offload.disk.host_buffer import HostBuffer

_log = logging.getLogger(__name__)

SLOW = 1 / 3
"""Transfers below this fraction of the raw rate are reported."""


def measure_rate(folder: str, nbytes: int = 256 << 20) -> DiskRate:
    """Write and read a file in a folder with the transfers of the disk tier, and return the rates."""
    store = DiskStore(folder, pin=False)
    region = store.region_of(store.empty(torch.Size((nbytes,)), torch.uint8))
    buffer = HostBuffer(nbytes, pin=False)
    buffer.bytes.fill_(1)
    seconds = []
    for begin in (store.begin_write, store.begin_read):
        start = time.perf_counter()
        begin(region, buffer, 0).wait()
        seconds.append(max(time.perf_counter() - start, 1e-9))
    return DiskRate(read=nbytes / seconds[1], write=nbytes / seconds[0])


def warn_if_slow(folder: str, moved: int, seconds: float, expected: DiskRate) -> bool:
    """Log a warning with both rates where `moved` bytes took far longer than expected; return whether it did."""
    if seconds <= 0 or moved / seconds >= SLOW * expected.mixed:
        return False
    _log.warning(
        "%s: a step moved %.2f GB at %.3f GB/s; the folder did %s when it was opened. Fix: stop what else uses the "
        "disk, or use another folder",
        folder,
        moved / 1e9,
        moved / seconds / 1e9,
        expected,
    )
    return True
