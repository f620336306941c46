"""Members of a .7z archive as streams, in constant memory: the archive is unpacked by a thread into a bounded pipe.

Members are compressed together in blocks. One that is damaged costs itself and those behind it in its block; the next
block has nothing to do with it.
"""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

_BLOCK_BYTES = 1 << 20
_MOST_BLOCKS = 8


class EncryptedError(ValueError):
    """The archive wants a password."""


class MemberError(ValueError):
    """A member that is not read: which, and by which rule."""

    def __init__(self, reason: str, name: str, why: str) -> None:
        super().__init__(why)
        self.reason, self.name = reason, name


def members(file: BinaryIO, is_bomb: Callable[[int], bool]) -> Iterator[tuple[str, BinaryIO] | MemberError]:
    """(name, content) of each member in archive order, an error in the place of one that is not read; a content that is
    not read to its end is skipped. `is_bomb` says of a declared length whether it is more than text can grow to.
    """
    import py7zr
    from py7zr.exceptions import PasswordRequired
    from py7zr.io import Py7zIO, WriterFactory

    blocks: queue.Queue[Any] = queue.Queue(_MOST_BLOCKS)
    stopped = threading.Event()
    begun: list[str] = []

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
            begun.append(name)
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
                if archive.needs_password():
                    raise PasswordRequired("a password is needed")
                wanted, refused = _readable(archive.files, is_bomb)
                for error in refused:
                    put(("refused", error))
                while wanted:
                    begun.clear()
                    try:
                        archive.extract(targets=[member.filename for member in wanted], factory=Factory())
                        break
                    except InterruptedError:
                        raise
                    except Exception as error:
                        if not begun:
                            raise
                        put(("failed", error))
                        # The checksums of what is skipped are looked at too: from a block with damage nothing more
                        # can be had.
                        bad = wanted[min(len(begun), len(wanted)) - 1]
                        behind = wanted[wanted.index(bad) + 1 :]
                        wanted = [member for member in behind if member.folder is not bad.folder]
                        for member in behind:
                            if member.folder is bad.folder:
                                why = f"it stands behind {bad.filename}, which is damaged"
                                put(("refused", MemberError("damaged member", member.filename, why)))
                        archive.reset()
            put(("end", None))
        except InterruptedError:
            return
        except PasswordRequired as error:
            put(("broken", EncryptedError(str(error)[:100])))
        except Exception as error:
            put(("broken", OSError(f"damaged 7z archive: {error}")))

    thread = threading.Thread(target=unpack, daemon=True)
    thread.start()
    try:
        yield from _contents(blocks)
    finally:
        stopped.set()
        thread.join()


def _readable(files: Any, is_bomb: Callable[[int], bool]) -> tuple[list[Any], list[MemberError]]:
    """The members to unpack, and why not the others; what stands behind a bomb in its block cannot be reached."""
    wanted: list[Any] = []
    refused: list[MemberError] = []
    blocked: set[int] = set()
    for member in files:
        if member.is_directory:
            continue
        name = member.filename
        if is_bomb(member.uncompressed) or id(member.folder) in blocked:
            why = f"{member.uncompressed} bytes" if is_bomb(member.uncompressed) else "behind one in the same block"
            blocked.add(id(member.folder))
            refused.append(MemberError("compression bomb", name, why))
        elif name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or name[1:2] == ":":
            refused.append(MemberError("unsafe member name", name, ""))
        elif member.is_symlink or member.is_junction or member.is_socket:
            refused.append(MemberError("not a regular file", name, ""))
        else:
            wanted.append(member)
    return wanted, refused


def _contents(blocks: queue.Queue[Any]) -> Iterator[tuple[str, BinaryIO] | MemberError]:
    kind, value = blocks.get()
    while kind != "end":
        if kind == "broken":
            raise value
        if kind == "refused":
            yield value
        if kind != "begin":
            kind, value = blocks.get()
            continue
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
        if not self._rest and self.next_event[0] in ("failed", "broken"):
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
