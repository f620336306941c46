"""`DirectIO`: read and write files past the page cache from a small pool of threads.

The system calls release the interpreter lock, so a few threads with large aligned transfers reach the rate of the disk;
no library for asynchronous I/O is needed. Optimizer states move between page-aligned buffers and their files in place;
weights go to tensors of any alignment on any device, through staging buffers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from piledriver.engine.offload.disk.host_buffer import PAGE_BYTES
from piledriver.engine.offload.disk.opened_file import OpenedFile
from piledriver.engine.offload.disk.staging import StagingBuffers

CHUNK_BYTES = 8 << 20
STAGED_BYTES = 4 << 20
"""Of a chunk that is staged for host memory: small enough that the copy out of the buffer finds it in a cache."""
DEVICE_STAGED_BYTES = 8 << 20
"""Of one that is staged for a GPU: every chunk costs calls of the driver, between which its thread does not read."""
THREADS = 4


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


class Transfer:
    """A read or write in flight, in chunks."""

    def __init__(self, nbytes: int, chunks: int, stream: torch.cuda.Stream | None = None) -> None:
        self.nbytes = nbytes
        self.seconds = 0.0
        """From the start of the first chunk to the end of the last one."""
        self.arrived: torch.cuda.Event | None = None
        """On a GPU: recorded after the last copy."""
        self._stream = stream
        self._begun, self._left = 0.0, chunks
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []
        if chunks == 0:
            self._done.set()

    def wait(self) -> None:
        """Wait until it is done; raise what failed. On a GPU, copies may still run until `arrived`."""
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

    def begin_chunk(self) -> None:
        """Record that a chunk starts."""
        with self._lock:
            self._begun = self._begun or time.perf_counter()

    def finish_chunk(self, error: BaseException | None) -> None:
        """Record that one chunk is done."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if self._left:
                return
            self.seconds = time.perf_counter() - self._begun
            if self._stream is not None:
                self.arrived = self._stream.record_event()
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
    """A pool of threads that transfers between files and memory. Transfers begin in the order of their calls.

    Threads of a pool that is collected end after what is queued; nothing waits for them then: the garbage collector may
    run in one of them, or while a lock is held that a thread needs to end.
    """

    def __init__(
        self,
        threads: int = THREADS,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        staged_bytes: int = STAGED_BYTES,
        device_staged_bytes: int = DEVICE_STAGED_BYTES,
    ) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="direct-io")
        self._chunk = chunk_bytes
        self._to_host = StagingBuffers(staged_bytes, 2 * threads)
        self._to_device = StagingBuffers(device_staged_bytes, 2 * threads)
        self.meter = IoMeter()

    def read(self, file: OpenedFile, offset: int, into: memoryview, needed: int | None = None) -> Transfer:
        """Begin to read whole pages at an offset into page-aligned memory.

        The file may end after `needed` bytes (default: all), within the last page.
        """
        needed = len(into) if needed is None else needed
        chunks = range(0, len(into), self._chunk)
        transfer = Transfer(len(into), len(chunks))
        for start in chunks:
            part = into[start : start + self._chunk]
            least = min(len(part), needed - start)
            self._queue(transfer, len(part), partial(file.read, offset + start, part, least))
        return transfer

    def write(self, file: OpenedFile, offset: int, source: memoryview) -> Transfer:
        """Begin to write whole pages of page-aligned memory, which must not change until it is done."""
        chunks = range(0, len(source), self._chunk)
        transfer = Transfer(len(source), len(chunks))
        for start in chunks:
            part = source[start : start + self._chunk]
            self._queue(transfer, len(part), partial(file.write, offset + start, part), is_write=True)
        return transfer

    def read_tensors(
        self, jobs: Sequence[tuple[OpenedFile, int, Tensor]], stream: torch.cuda.Stream | None = None
    ) -> Transfer:
        """Begin to read files at any offset into contiguous tensors on one device of any kind.

        Copies to a GPU run on `stream`, by default the caller's current one.
        """
        if stream is None and jobs and jobs[0][2].is_cuda:
            stream = torch.cuda.current_stream(jobs[0][2].device)
        chunks = [(file, *chunk) for file, offset, target in jobs for chunk in self._pieces(offset, target)]
        transfer = Transfer(sum(target.nbytes for *_, target in jobs), len(chunks), stream)
        for file, at, part in chunks:
            self._queue(transfer, part.nbytes, partial(self._staging(part).read, file, at, part, stream))
        return transfer

    def _staging(self, target: Tensor) -> StagingBuffers:
        return self._to_host if target.device.type == "cpu" else self._to_device

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        self._threads.shutdown()
        self._to_host.close()
        self._to_device.close()

    def _pieces(self, offset: int, target: Tensor) -> list[tuple[int, Tensor]]:
        flat = target.detach().view(-1).view(torch.uint8)
        most = self._staging(target).nbytes
        found, at, end = [], offset, offset + flat.nbytes
        while at < end:
            # Pieces end at multiples of the page size, so that the next ones start there.
            stop = min(end, (at + most) & ~(PAGE_BYTES - 1))
            found.append((at, flat[at - offset : stop - offset]))
            at = stop
        return found

    def _queue(self, transfer: Transfer, nbytes: int, move: Callable[[], None], *, is_write: bool = False) -> None:
        self.meter.begin()
        self._threads.submit(self._run, transfer, nbytes, move, is_write)

    def _run(self, transfer: Transfer, nbytes: int, move: Callable[[], None], is_write: bool) -> None:
        error: BaseException | None = None
        transfer.begin_chunk()
        try:
            move()
        except BaseException as failed:
            error = failed
        self.meter.end(nbytes, is_write=is_write)
        transfer.finish_chunk(error)
