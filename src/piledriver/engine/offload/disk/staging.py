"""Staging buffers: through them bytes at any offset of a file reach memory of any alignment, on any device."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import defaultdict, deque
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from piledriver.engine.offload.disk.host_buffer import PAGE_BYTES, HostBuffer, whole_pages
from piledriver.engine.offload.disk.opened_file import OpenedFile

# Pinned buffers of pools that are closed, by size: pinning memory costs more than a read of as many bytes.
_pinned: dict[int, deque[HostBuffer]] = defaultdict(partial(deque, maxlen=16))


class StagingBuffers:
    """A bounded number of buffers, pinned if there is a GPU, made when first needed and used again and again.

    Its methods are called by the threads of a pool.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        """The largest piece that one buffer takes."""
        self._left = count
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[tuple[HostBuffer, torch.cuda.Event | None]] = queue.SimpleQueue()

    def read(self, file: OpenedFile, offset: int, target: Tensor, stream: torch.cuda.Stream | None) -> None:
        """Read into a tensor of bytes; a copy to a GPU is queued on `stream`.

        Where pages of the file are pages of host memory, they are read in place.
        """
        if target.device.type == "cpu" and (target.data_ptr() - offset) % PAGE_BYTES == 0:
            lead = -offset % PAGE_BYTES
            whole = max(target.nbytes - lead, 0) & ~(PAGE_BYTES - 1)
            if whole:
                file.read(offset + lead, _borrowed(target[lead:], whole))
                if lead:
                    self._read_staged(file, offset, target[:lead], stream)
                offset, target = offset + lead + whole, target[lead + whole :]
        if target.nbytes:
            self._read_staged(file, offset, target, stream)

    def _read_staged(self, file: OpenedFile, offset: int, target: Tensor, stream: torch.cuda.Stream | None) -> None:
        buffer, copied = self._take()
        try:
            if copied is not None:
                copied.synchronize()  # the copy that last used this buffer
            start = offset & ~(PAGE_BYTES - 1)
            lead = offset - start
            needed = lead + target.nbytes
            file.read(start, buffer.view[: whole_pages(needed)], needed)
            source = buffer.bytes[lead:needed]
            if stream is None:
                target.copy_(source)
            else:
                if torch.cuda.current_stream(stream.device) != stream:
                    torch.cuda.set_stream(stream)  # of this thread, which does nothing else
                target.copy_(source, non_blocking=True)
                copied = copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record(stream)
        finally:
            self._free.put((buffer, copied))

    def _take(self) -> tuple[HostBuffer, torch.cuda.Event | None]:
        with suppress(queue.Empty):
            return self._free.get_nowait()
        with self._lock:
            make, self._left = self._left > 0, self._left - 1
        if not make:
            return self._free.get()
        with suppress(IndexError):
            return _pinned[self.nbytes].pop(), None
        # Pieces that start within a page end within another one.
        return HostBuffer(self.nbytes + 2 * PAGE_BYTES), None

    def close(self) -> None:
        """Leave pinned buffers, none of which is in use, to later pools of this process."""
        with suppress(queue.Empty):
            while torch.cuda.is_available():
                buffer, copied = self._free.get_nowait()
                if copied is not None:
                    copied.synchronize()
                _pinned[self.nbytes].append(buffer)


def _borrowed(tensor: Tensor, nbytes: int) -> memoryview:
    """Return the first bytes of a tensor, which must outlive them; torch can resize its memory afterwards."""
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
