"""Members of a .7z archive as streams, in constant memory: the archive is unpacked by a thread into a bounded pipe."""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

_BLOCK_BYTES = 1 << 20
_MOST_BLOCKS = 8
_END = None


def members(file: BinaryIO) -> Iterator[tuple[str, BinaryIO]]:
    """(name, content) of each member in archive order; a content that is not read to its end is skipped."""
    import py7zr
    from py7zr.io import Py7zIO, WriterFactory

    blocks: queue.Queue[Any] = queue.Queue(_MOST_BLOCKS)
    stopped = threading.Event()

    def put(item: Any) -> None:
        while not stopped.is_set():
            try:
                blocks.put(item, timeout=0.5)
                return
            except queue.Full:
                continue
        raise InterruptedError("the reader has left")

    class Writer(Py7zIO):
        def __init__(self, name: str) -> None:
            self.name = name
            self.length = 0
            put(("begin", name))

        def write(self, s: bytes | bytearray) -> int:
            self.length += len(s)
            put(("data", bytes(s)))
            return len(s)

        def read(self, size: int | None = None) -> bytes:
            return b""

        def seek(self, offset: int, whence: int = 0) -> int:
            return 0

        def flush(self) -> None:
            return None

        def size(self) -> int:
            return self.length

    class Factory(WriterFactory):
        def create(self, filename: str) -> Py7zIO:
            return Writer(filename)

    def unpack() -> None:
        try:
            with py7zr.SevenZipFile(file, "r") as archive:
                archive.extractall(factory=Factory())
            put(("end", None))
        except InterruptedError:
            return
        except Exception as error:
            put(("failed", error))

    thread = threading.Thread(target=unpack, daemon=True)
    thread.start()
    try:
        yield from _contents(blocks)
    finally:
        stopped.set()
        thread.join()


def _contents(blocks: queue.Queue[Any]) -> Iterator[tuple[str, BinaryIO]]:
    kind, value = blocks.get()
    while kind != "end":
        if kind == "failed":
            raise OSError(f"damaged 7z archive: {value}")
        content = _Content(blocks)
        yield value, cast(BinaryIO, io.BufferedReader(content, _BLOCK_BYTES))
        content.drain()
        kind, value = content.next_event


class _Content(io.RawIOBase):
    """The blocks of one member, until the event that begins the next one."""

    def __init__(self, blocks: queue.Queue[Any]) -> None:
        self._blocks = blocks
        self._rest = b""
        self.next_event: tuple[str, Any] = ("", None)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._rest and not self.next_event[0]:
            self._take()
        if not self._rest and self.next_event[0] == "failed":
            raise OSError(f"damaged 7z archive: {self.next_event[1]}")
        given = self._rest[: len(buffer)]
        buffer[: len(given)] = given
        self._rest = self._rest[len(given) :]
        return len(given)

    def drain(self) -> None:
        """Read what is left of this member, so that the next one can begin."""
        while not self.next_event[0]:
            self._rest = b""
            self._take()

    def _take(self) -> None:
        kind, value = self._blocks.get()
        if kind == "data":
            self._rest = value
        else:
            self.next_event = (kind, value)
