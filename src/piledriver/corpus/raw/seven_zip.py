"""Members of a .7z archive as streams in constant memory: a thread unpacks the archive into a bounded queue.

Members are compressed together in blocks. A damaged member costs itself and those after it in its block; other blocks
are not affected.
"""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import py7zr
from py7zr.exceptions import PasswordRequired
from py7zr.io import Py7zIO, WriterFactory

_BLOCK_BYTES = 1 << 20
_QUEUED_BLOCKS = 8
_END = ("end", None)


class EncryptedError(ValueError):
    """The archive needs a password."""


class MemberError(ValueError):
    """A member that is not read: its name, and `reason`, a short stable phrase."""

    def __init__(self, reason: str, name: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.name = reason, name


def members(file: BinaryIO, is_bomb: Callable[[int], bool]) -> Iterator[tuple[str, BinaryIO] | MemberError]:
    """Yield (name, content) of each member in archive order, an error in place of one that is not read.

    A content that is not read to its end is skipped. `is_bomb` tells whether a declared length is more than text can
    expand to.
    """
    events = _Events()
    thread = threading.Thread(target=_unpack, args=(file, is_bomb, events), daemon=True)
    thread.start()
    try:
        yield from _contents(events.queue)
    finally:
        events.stopped.set()
        thread.join()


class _Events:
    """The queue from the thread that unpacks to the reader: (kind, value)."""

    def __init__(self) -> None:
        self.queue: queue.Queue[tuple[str, Any]] = queue.Queue(_QUEUED_BLOCKS)
        self.stopped = threading.Event()

    def put(self, kind: str, value: Any) -> None:
        """Wait for room and add an event; raise `InterruptedError` where the reader is gone."""
        while not self.stopped.is_set():
            try:
                self.queue.put((kind, value), timeout=0.5)
                return
            except queue.Full:
                continue
        raise InterruptedError("the reader is closed")


def _unpack(file: BinaryIO, is_bomb: Callable[[int], bool], events: _Events) -> None:
    """Unpack all members into events: the body of the thread."""
    try:
        with py7zr.SevenZipFile(file, "r") as archive:
            if archive.needs_password():
                raise PasswordRequired("a password is needed")
            wanted, refused = _readable(archive.files, is_bomb)
            for error in refused:
                events.put("refused", error)
            while wanted:
                factory = _Factory(events)
                try:
                    archive.extract(targets=[member.filename for member in wanted], factory=factory)
                    break
                except InterruptedError:
                    raise
                except Exception as error:
                    if not factory.begun:
                        raise
                    events.put("failed", error)
                    # py7zr verifies skipped members too, so nothing more can be read from a block with damage.
                    wanted = _after_damage(wanted, factory.begun, events)
                    archive.reset()
        events.put(*_END)
    except InterruptedError:
        return
    except PasswordRequired as error:
        events.put("broken", EncryptedError(str(error)[:100]))
    except Exception as error:
        events.put("broken", OSError(f"damaged 7z archive: {error}"))


def _after_damage(wanted: list[Any], begun: int, events: _Events) -> list[Any]:
    """Return the members after the damaged one that are in other blocks; report those in its block."""
    bad = wanted[min(begun, len(wanted)) - 1]
    behind = wanted[wanted.index(bad) + 1 :]
    for member in behind:
        if member.folder is bad.folder:
            detail = f"in the same block after {bad.filename}, which is damaged"
            events.put("refused", MemberError("damaged member", member.filename, detail))
    return [member for member in behind if member.folder is not bad.folder]


class _Factory(WriterFactory):
    """Makes a writer for each member, and counts them in `begun`."""

    def __init__(self, events: _Events) -> None:
        self._events = events
        self.begun = 0

    def create(self, filename: str) -> Py7zIO:
        self.begun += 1
        return _Writer(filename, self._events)


class _Writer(Py7zIO):
    """The file that py7zr unpacks a member into: its writes become events."""

    def __init__(self, name: str, events: _Events) -> None:
        self._events, self._length = events, 0
        events.put("begin", name)

    def write(self, s: bytes | bytearray) -> int:
        self._length += len(s)
        self._events.put("data", bytes(s))
        return len(s)

    def read(self, size: int | None = None) -> bytes:
        return b""

    def seek(self, offset: int, whence: int = 0) -> int:
        return 0

    def flush(self) -> None:
        return None

    def size(self) -> int:
        return self._length


def _readable(files: Any, is_bomb: Callable[[int], bool]) -> tuple[list[Any], list[MemberError]]:
    """Return the members to unpack and the errors of the others; those after a bomb in its block cannot be reached."""
    wanted: list[Any] = []
    refused: list[MemberError] = []
    blocked: set[int] = set()
    for member in files:
        if member.is_directory:
            continue
        name = member.filename
        if is_bomb(member.uncompressed) or id(member.folder) in blocked:
            detail = f"{member.uncompressed} bytes" if is_bomb(member.uncompressed) else "after one in the same block"
            blocked.add(id(member.folder))
            refused.append(MemberError("compression bomb", name, detail))
        elif name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or name[1:2] == ":":
            refused.append(MemberError("unsafe member name", name, ""))
        elif member.is_symlink or member.is_junction or member.is_socket:
            refused.append(MemberError("not a regular file", name, ""))
        else:
            wanted.append(member)
    return wanted, refused


def _contents(events: queue.Queue[tuple[str, Any]]) -> Iterator[tuple[str, BinaryIO] | MemberError]:
    kind, value = events.get()
    while kind != "end":
        if kind == "broken":
            raise value
        if kind == "refused":
            yield value
        if kind != "begin":
            kind, value = events.get()
            continue
        content = _Content(events)
        yield value, cast(BinaryIO, io.BufferedReader(content, _BLOCK_BYTES))
        content.drain()
        kind, value = content.next_event


class _Content(io.RawIOBase):
    """The blocks of one member, up to the event that follows it."""

    def __init__(self, events: queue.Queue[tuple[str, Any]]) -> None:
        self._events = events
        self._rest = b""
        self._given = 0
        self.next_event: tuple[str, Any] = ("", None)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._rest and not self.next_event[0]:
            self._take()
        if not self._rest and self.next_event[0] in ("failed", "broken"):
            raise OSError(f"damaged 7z archive: {self.next_event[1]}")
        given = self._rest[: len(buffer)]
        buffer[: len(given)] = given
        self._rest = self._rest[len(given) :]
        self._given += len(given)
        return len(given)

    def tell(self) -> int:
        """Return how many bytes were read."""
        return self._given

    def drain(self) -> None:
        """Discard the rest of this member, so that the next one can begin."""
        while not self.next_event[0]:
            self._rest = b""
            self._take()

    def _take(self) -> None:
        kind, value = self._events.get()
        if kind == "data":
            self._rest = value
        else:
            self.next_event = (kind, value)
