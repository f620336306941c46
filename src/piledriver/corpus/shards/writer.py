"""Write documents to `jsonl.zst`: frames of a few MB with a seek table, atomic, checksummed.

A frame is closed when it holds `FRAME_BYTES` of lines, so the bytes of a shard depend on its documents alone, and not
on the number of threads that compress.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO

import zstandard

from piledriver.core import storage
from piledriver.corpus.document import Document, to_line
from piledriver.corpus.shards.seek_table import FIRST_FRAME, encode_table

FRAME_BYTES = 2 << 20
SUFFIX = ".jsonl.zst"


@dataclass(frozen=True)
class ShardSummary:
    """The counts and checksum of a finished shard file, for a manifest."""

    path: str
    documents: int
    text_lines_bytes: int
    compressed_bytes: int
    sha256: str


class ShardFileWriter(AbstractContextManager["ShardFileWriter"]):
    """A writer of one shard file, which appears at `close`; an exception in the `with` block leaves no file.

    >>> import tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "00000.jsonl.zst")
    >>> with ShardFileWriter(path) as shard:
    ...     shard.write(Document("hello"))
    >>> shard.summary.documents
    1
    """

    def __init__(self, path: storage.Location, *, level: int = 3, threads: int = 1) -> None:
        self.path = str(path)
        self.summary: ShardSummary
        self._level = level
        self._lines: list[bytes] = []
        self._pending_bytes = 0
        # Not the sum of the frames: threads may still be compressing some.
        self.bytes_taken = 0
        self._sizes: tuple[list[int], list[int], list[int]] = ([], [], [])
        self._digest = hashlib.sha256()
        self._compressors = threading.local()
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None
        self._in_flight: deque[tuple[Future[bytes], int, int]] = deque()
        self._most_in_flight = 2 * threads
        self._atomic: AbstractContextManager[BinaryIO] = storage.atomic_write(path)
        self._file = self._atomic.__enter__()
        self._append(FIRST_FRAME, 0, 0)

    def write(self, document: Document) -> None:
        """Add one document."""
        self.write_line(to_line(document))

    def write_line(self, line: bytes) -> None:
        """Add one encoded document (see `to_line`)."""
        self._lines.append(line)
        self._pending_bytes += len(line)
        self.bytes_taken += len(line)
        if self._pending_bytes >= FRAME_BYTES:
            self._close_frame()

    def close(self) -> ShardSummary:
        """Write the last frame and the seek table, and rename the file to its path."""
        self._close_frame()
        while self._in_flight:
            self._write_oldest()
        self._emit(encode_table(*self._sizes))
        compressed_bytes = self._file.tell()
        self._shut_pool()
        self._atomic.__exit__(None, None, None)
        documents, text_bytes = sum(self._sizes[2]), sum(self._sizes[1])
        self.summary = ShardSummary(self.path, documents, text_bytes, compressed_bytes, self._digest.hexdigest())
        return self.summary

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        self._shut_pool()
        self._atomic.__exit__(kind, error, trace)

    def _close_frame(self) -> None:
        if not self._lines:
            return
        content, count = b"".join(self._lines), len(self._lines)
        self._lines, self._pending_bytes = [], 0
        if self._pool is None:
            self._append(self._compress(content), len(content), count)
            return
        self._in_flight.append((self._pool.submit(self._compress, content), len(content), count))
        if len(self._in_flight) > self._most_in_flight:
            self._write_oldest()

    def _write_oldest(self) -> None:
        future, size, count = self._in_flight.popleft()
        self._append(future.result(), size, count)

    def _append(self, frame: bytes, size: int, count: int) -> None:
        self._emit(frame)
        for values, value in zip(self._sizes, (len(frame), size, count), strict=True):
            values.append(value)

    def _emit(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)

    def _compress(self, content: bytes) -> bytes:
        if not hasattr(self._compressors, "own"):
            # Compressors must not be shared between threads.
            self._compressors.own = zstandard.ZstdCompressor(level=self._level, write_checksum=True)
        compressed: bytes = self._compressors.own.compress(content)
        return compressed

    def _shut_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class ShardWriter(AbstractContextManager["ShardWriter"]):
    """A writer of a folder of shards `00000.jsonl.zst`, ..., each closed after `shard_bytes` of lines."""

    def __init__(
        self, folder: storage.Location, *, shard_bytes: int = 1 << 30, level: int = 3, threads: int = 1
    ) -> None:
        self.folder = folder
        self.summaries: list[ShardSummary] = []
        self._shard_bytes = shard_bytes
        self._level, self._threads = level, threads
        self._current: ShardFileWriter | None = None

    def write(self, document: Document) -> None:
        """Add one document."""
        self.write_line(to_line(document))

    def write_line(self, line: bytes) -> None:
        """Add one encoded document (see `to_line`)."""
        if self._current is None:
            name = f"{len(self.summaries):05d}{SUFFIX}"
            path = storage.join(self.folder, name)
            self._current = ShardFileWriter(path, level=self._level, threads=self._threads)
        self._current.write_line(line)
        if self._current.bytes_taken >= self._shard_bytes:
            self._finish_current()

    def close(self) -> list[ShardSummary]:
        """Finish the last shard; return the summaries of all."""
        self._finish_current()
        return self.summaries

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._current is not None:
            self._current.__exit__(kind, error, trace)

    def _finish_current(self) -> None:
        if self._current is not None:
            self.summaries.append(self._current.close())
            self._current = None
