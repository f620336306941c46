"""Read and write files past the page cache (O_DIRECT) from a small pool of threads.

The system calls release the interpreter lock, so a few threads with large aligned transfers reach the rate of the disk;
no library for asynchronous I/O is needed. Where the filesystem rejects O_DIRECT (tmpfs, some overlays) the same calls
go through the page cache, which is then told to drop what was transferred.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piledriver.engine.offload.disk.errors import disk_error
from piledriver.engine.offload.pinned import page_aligned_empty, pin_pages

PAGE_BYTES = 4096
CHUNK_BYTES = 8 << 20
THREADS = 4


def whole_pages(nbytes: int) -> int:
    """Return the bytes of whole pages that hold `nbytes`.

    >>> whole_pages(1), whole_pages(4096), whole_pages(4097)
    (4096, 4096, 8192)
    """
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor of bytes."""
    array: Any = tensor.numpy()
    return memoryview(array)


class HostBuffer:
    """Page-aligned host memory for transfers, pinned if there is a GPU.

    >>> HostBuffer(10).tensor(0, (2, 3), torch.float32).zero_().shape
    torch.Size([2, 3])
    """

    def __init__(self, nbytes: int, *, pin: bool = True) -> None:
        self.nbytes = whole_pages(max(nbytes, 1))
        self.bytes = page_aligned_empty(torch.Size((self.nbytes,)), torch.uint8)
        if pin:
            pin_pages(self.bytes, owner=self)
        self.view = memory_of(self.bytes)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the memory at an offset as a tensor."""
        size = torch.Size(shape)
        return self.bytes[offset : offset + size.numel() * dtype.itemsize].view(dtype).view(size)


@dataclass(frozen=True)
class DiskRate:
    """Bytes per second of a folder."""

    read: float
    write: float

    @property
    def mixed(self) -> float:
        """Bytes per second of as many reads as writes."""
        return 2.0 / (1.0 / self.read + 1.0 / self.write)

    def __str__(self) -> str:
        return f"read {self.read / 1e9:.2f} GB/s, write {self.write / 1e9:.2f} GB/s"


@dataclass(frozen=True)
class OpenedFile:
    """A file that the pool reads and writes: its descriptor, whether it bypasses the page cache, its folder."""

    descriptor: int
    is_direct: bool
    folder: str


class Transfer:
    """A read or write in flight, in chunks."""

    def __init__(self, chunks: int) -> None:
        self._left = chunks
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []
        if chunks == 0:
            self._done.set()

    def wait(self) -> None:
        """Wait until it is done; raise what failed."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def then(self, call: Callable[[], None]) -> None:
        """Call a function when it is done, failed or not."""
        with self._lock:
            if not self._done.is_set():
                self._then.append(call)
                return
        call()

    def finish_chunk(self, error: BaseException | None) -> None:
        """Record that one chunk is done."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
            self._done.set()
        for call in self._then:
            call()


class IoMeter:
    """Counts the bytes of a pool, and the seconds in which at least one transfer was in flight."""

    def __init__(self) -> None:
        self.bytes_read = self.bytes_written = 0
        self.busy_seconds = 0.0
        self._lock = threading.Lock()
        self._underway, self._since = 0, 0.0

    def begin(self) -> None:
        """Count a chunk that was queued."""
        with self._lock:
            if self._underway == 0:
                self._since = time.perf_counter()
            self._underway += 1

    def end(self, nbytes: int, *, is_write: bool) -> None:
        """Count a chunk that is done."""
        with self._lock:
            self._underway -= 1
            if self._underway == 0:
                self.busy_seconds += time.perf_counter() - self._since
            if is_write:
                self.bytes_written += nbytes
            else:
                self.bytes_read += nbytes

    def now(self) -> tuple[int, float]:
        """Return the bytes moved and the busy seconds so far."""
        with self._lock:
            running = time.perf_counter() - self._since if self._underway else 0.0
            return self.bytes_read + self.bytes_written, self.busy_seconds + running


class DirectIO:
    """A pool of threads that transfers between files and host memory.

    Offsets, lengths and addresses are multiples of a page. Transfers begin in the order in which they were queued.
    """

    def __init__(self, threads: int = THREADS, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="disk")
        self._chunk = chunk_bytes
        self.meter = IoMeter()

    def read(self, file: OpenedFile, offset: int, into: memoryview) -> Transfer:
        """Begin to read bytes at an offset."""
        return self._queue(file, offset, into, is_write=False)

    def write(self, file: OpenedFile, offset: int, source: memoryview) -> Transfer:
        """Begin to write bytes at an offset; the memory must not change until it is done."""
        return self._queue(file, offset, source, is_write=True)

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        self._threads.shutdown()

    def _queue(self, file: OpenedFile, offset: int, memory: memoryview, *, is_write: bool) -> Transfer:
        starts = range(0, len(memory), self._chunk)
        transfer = Transfer(len(starts))
        for start in starts:
            self.meter.begin()
            part = memory[start : start + self._chunk]
            self._threads.submit(self._move, transfer, file, offset + start, part, is_write)
        return transfer

    def _move(self, transfer: Transfer, file: OpenedFile, offset: int, memory: memoryview, is_write: bool) -> None:
        error: BaseException | None = None
        try:
            _move_all(file, offset, memory, is_write=is_write)
        except OSError as failed:
            error = disk_error(failed, f"{'writing' if is_write else 'reading'} {len(memory):,} bytes", file.folder)
        except BaseException as failed:
            error = failed
        self.meter.end(len(memory), is_write=is_write)
        transfer.finish_chunk(error)


def _move_all(file: OpenedFile, offset: int, memory: memoryview, *, is_write: bool) -> None:
    call = os.pwritev if is_write else os.preadv
    done = 0
    while done < len(memory):
        moved = call(file.descriptor, [memory[done:]], offset + done)
        if moved == 0:
            raise disk_error(OSError("the file ends early"), f"reading {len(memory):,} bytes", file.folder)
        done += moved
    if not file.is_direct:
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)


def open_direct(path: str, flags: int, *, folder: str) -> OpenedFile:
    """Open an existing file with O_DIRECT, or through the page cache where the filesystem rejects it."""
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, flags | direct | os.O_CLOEXEC)
            if _accepts(descriptor):
                return OpenedFile(descriptor, True, folder)
            os.close(descriptor)
    return OpenedFile(os.open(path, flags | os.O_CLOEXEC), False, folder)


def _accepts(descriptor: int) -> bool:
    """Whether a descriptor reads with the alignment of a page: some filesystems only reject the first transfer."""
    try:
        os.preadv(descriptor, [memory_of(page_aligned_empty(torch.Size((PAGE_BYTES,)), torch.uint8))], 0)
    except OSError:
        return False
    return True
