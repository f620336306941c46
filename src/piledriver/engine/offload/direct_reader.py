"""Read extents of files into tensors with direct I/O: threads, page-aligned staging buffers, any destination device.

Direct reads pass by the page cache, so weights that are read once for every forward do not fill it, and the bytes are
copied once. A chunk is read into a staging buffer (pinned, if there is a GPU) and copied from there; a destination in
host memory whose address and file offset are page-aligned is read in place. File systems without direct I/O are read
through the page cache.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from piledriver.core.errors import StorageError
from piledriver.engine.offload.disk.direct_io import (
    PAGE_BYTES,
    THREADS,
    HostBuffer,
    OpenedFile,
    memory_of,
    open_direct,
    whole_pages,
)
from piledriver.engine.offload.extents import Extent

CHUNK_BYTES = 4 << 20
"""Of a read: small enough that the copy out of the staging buffer finds it in a cache."""


class Reading:
    """Chunks on their way; `wait` returns when all bytes are in place, or raises what went wrong."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.seconds = 0.0
        """From the first read to the end of the last one."""
        self.arrived: torch.cuda.Event | None = None
        """On a GPU: recorded after the last copy."""
        self._chunks: list[Future[None]] = []
        self._begun, self._left = 0.0, 0
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait for the reads; on a GPU, copies may still run until `arrived`."""
        for chunk in self._chunks:
            chunk.result()


class DirectReader:
    """Threads that read extents of files into tensors.

    >>> import tempfile
    >>> target = torch.empty(3)
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(b"head" + torch.arange(3.0).numpy().tobytes()), file.flush()
    ...     with DirectReader() as reader:
    ...         reader.read([(Extent(file.name, 4, torch.float32, (3,)), target)]).wait()
    >>> target
    tensor([0., 1., 2.])
    """

    def __init__(self, *, threads: int = THREADS, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.chunk_bytes = chunk_bytes
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="direct-read")
        self._files: dict[str, OpenedFile] = {}
        self._lock = threading.Lock()
        self._buffers: queue.SimpleQueue[tuple[HostBuffer, torch.cuda.Event | None]] = queue.SimpleQueue()
        self._buffers_left = 2 * threads
        self._finalizer = weakref.finalize(self, _close_all, self._pool, self._files)

    def __enter__(self) -> DirectReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish the reads and close the files."""
        self._finalizer()

    def read(self, jobs: Sequence[tuple[Extent, Tensor]], stream: torch.cuda.Stream | None = None) -> Reading:
        """Start reading extents into contiguous tensors of as many bytes; GPU copies run on `stream`."""
        reading = Reading(sum(extent.nbytes for extent, _ in jobs))
        chunks = [chunk for extent, target in jobs for chunk in self._chunks(extent, target)]
        reading._left = len(chunks)
        for file, path, offset, target in chunks:
            reading._chunks.append(self._pool.submit(self._read_chunk, reading, file, path, offset, target, stream))
        return reading

    def _chunks(self, extent: Extent, target: Tensor) -> list[tuple[OpenedFile, str, int, Tensor]]:
        if not extent.nbytes:
            return []
        flat = target.detach().view(-1).view(torch.uint8)
        if flat.nbytes != extent.nbytes:
            raise StorageError(
                f"{extent.path}: a tensor of {extent.nbytes} bytes at {extent.offset} was expected to have "
                f"{flat.nbytes}",
                fix="load the checkpoint of this model, in the dtype that it was saved in",
            )
        file = self._opened(extent.path)
        found, at, end = [], extent.offset, extent.offset + extent.nbytes
        while at < end:
            # Chunks end at multiples of the page size, so that the next ones start there.
            stop = min(end, (at + self.chunk_bytes) & ~(PAGE_BYTES - 1))
            found.append((file, extent.path, at, flat[at - extent.offset : stop - extent.offset]))
            at = stop
        return found

    def _opened(self, path: str) -> OpenedFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = _open(path)
            return self._files[path]

    def _read_chunk(
        self,
        reading: Reading,
        file: OpenedFile,
        path: str,
        offset: int,
        target: Tensor,
        stream: torch.cuda.Stream | None,
    ) -> None:
        begun = time.perf_counter()
        with reading._lock:
            reading._begun = reading._begun or begun
        if not target.is_cuda and target.device.type == "cpu" and (target.data_ptr() | offset) % PAGE_BYTES == 0:
            whole = target.nbytes & ~(PAGE_BYTES - 1)
            _read_into(file, path, offset, memory_of(target)[:whole], whole)
            offset, target = offset + whole, target[whole:]
        if target.nbytes:
            self._read_staged(file, path, offset, target, stream)
        with reading._lock:
            reading._left -= 1
            if reading._left:
                return
            reading.seconds = time.perf_counter() - reading._begun
            if stream is not None:
                reading.arrived = stream.record_event()

    def _read_staged(
        self, file: OpenedFile, path: str, offset: int, target: Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        buffer, copied = self._take_buffer()
        try:
            if copied is not None:
                copied.synchronize()  # the copy that last used this buffer
            start = offset & ~(PAGE_BYTES - 1)
            lead = offset - start
            view = buffer.view[: whole_pages(lead + target.nbytes)]
            _read_into(file, path, start, view, lead + target.nbytes)
            source = buffer.bytes[lead : lead + target.nbytes]
            if stream is None:
                target.copy_(source)
                copied = None
            else:
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
                    copied = stream.record_event()
        finally:
            self._buffers.put((buffer, copied))

    def _take_buffer(self) -> tuple[HostBuffer, torch.cuda.Event | None]:
        with suppress(queue.Empty):
            return self._buffers.get_nowait()
        with self._lock:
            make, self._buffers_left = self._buffers_left > 0, self._buffers_left - 1
        if not make:
            return self._buffers.get()
        return HostBuffer(self.chunk_bytes + 2 * PAGE_BYTES), None


def _open(path: str) -> OpenedFile:
    try:
        return open_direct(path, os.O_RDONLY, folder=os.path.dirname(path))
    except OSError as error:
        raise StorageError(
            f"cannot open {path}: {error.strerror}", fix="check that the folder of the weights is still there"
        ) from error


def _read_into(file: OpenedFile, path: str, offset: int, view: memoryview, needed: int) -> None:
    done = reached = 0
    while reached < needed:
        done = reached & ~(PAGE_BYTES - 1)  # a direct read must start at a page
        try:
            count = os.preadv(file.descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise StorageError(
                f"cannot read {path} at {offset + done:,}: {error.strerror}", fix="check the disk and its file system"
            ) from error
        if done + count <= reached:
            raise StorageError(
                f"{path} ends at {offset + reached:,}, {needed - reached:,} bytes too early",
                fix="the file was truncated: download or save it again",
            )
        reached = done + count


def _close_all(pool: ThreadPoolExecutor, files: dict[str, OpenedFile]) -> None:
    pool.shutdown(wait=True)
    for file in files.values():
        os.close(file.descriptor)
    files.clear()
