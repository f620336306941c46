"""Streams that return everything before the first damaged byte, then raise.

When its source fails, a buffered stream of the standard library loses all bytes that the same call had already read:
megabytes of intact records because of one damaged byte after them.
"""

from __future__ import annotations

import csv
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from typing import Any, BinaryIO, cast

import zstandard

from piledriver.core.errors import PiledriverError

DAMAGE = (
    *(EOFError, OSError, ValueError, SyntaxError, PiledriverError, csv.Error),
    *(zlib.error, lzma.LZMAError, zstandard.ZstdError, tarfile.TarError, zipfile.BadZipFile),
    # The standard library's archive readers raise these for wrong lengths and names.
    *(struct.error, IndexError, KeyError, OverflowError, NotImplementedError),
)
"""The exceptions that reading a damaged file raises."""


class PartialReader(io.BufferedReader):
    """A buffered stream over a `PartialRaw`.

    `read` returns the bytes before the damage and raises at the next call. `readline` never returns a line that the
    damage cuts, because the caller could not tell it from a complete one.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        """Return `size` bytes; fewer only at the end or before damage."""
        content = super().read(size)
        if not content and size != 0:
            self._raise_damage()
        return content

    def read1(self, size: int = -1, /) -> bytes:
        """Return the bytes that are available without another read."""
        content = super().read1(size)
        if not content and size != 0:
            self._raise_damage()
        return content

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return the next line."""
        line = super().readline(size)
        if line[-1:] != b"\n" and size != 0 and len(line) != size:
            self._raise_damage()
        return line

    def _raise_damage(self) -> None:
        damage = cast(PartialRaw, self.raw).damage
        if damage is not None:
            raise damage


class PartialRaw(io.RawIOBase):
    """A raw stream over any object with `read`; it ends where reading fails and keeps the error in `damage`."""

    damage: BaseException | None = None

    def __init__(self, inner: Any) -> None:
        self._inner, self._given = inner, 0
        # `read1` of a decompressor returns what it has; `read` would lose that when the next block is bad.
        self._read = getattr(inner, "read1", None) or inner.read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Read the next bytes; return 0 at the end and from the damage on."""
        if self.damage is not None:
            return 0
        try:
            content = self._read(len(buffer))
        except DAMAGE as error:
            self.damage = error
            return 0
        buffer[: len(content)] = content
        self._given += len(content)
        return len(content)

    def tell(self) -> int:
        """Return how many bytes were read."""
        return self._given


def peek_head(stream: BinaryIO, size: int) -> tuple[bytes, BinaryIO]:
    """Return the first bytes of a stream that cannot seek, and a stream that still starts with them.

    >>> head, stream = peek_head(io.BytesIO(b"one two"), 3)
    >>> head, stream.read()
    (b'one', b'one two')
    """
    head = stream.read(size)
    return head, cast(BinaryIO, PartialReader(_Joined(head, stream), 1 << 18))


class _Joined(PartialRaw):
    """A stream after bytes that were already read from it."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        super().__init__(rest)
        self._head = head

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        if not self._head:
            return super().readinto(buffer)
        content = self._head[: len(buffer)]
        self._head = self._head[len(buffer) :]
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._inner.close()
        super().close()
