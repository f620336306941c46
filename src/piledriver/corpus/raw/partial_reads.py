"""Reading up to where a stream is damaged: what was read before is given out, then the damage is raised.

A buffered stream of the standard library loses, when its source fails, everything that the same call had read already:
megabytes of good records for one damaged byte behind them.
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
    # What the standard library's readers of archives let slip when a length or a name is not what it should be.
    *(struct.error, IndexError, KeyError, OverflowError, NotImplementedError),
)
"""What reading a damaged file raises."""


class CarefulReader(io.BufferedReader):
    """A buffered stream over a `CarefulRaw`.

    `read` gives what there is before the damage and raises when it is asked again; a line that the damage cuts is not
    given out, because nobody could tell that it is not whole.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        """At most so many bytes; fewer only at the end or before damage."""
        content = super().read(size)
        if not content and size != 0:
            self._raise_damage()
        return content

    def read1(self, size: int = -1, /) -> bytes:
        """What is there without waiting for more."""
        content = super().read1(size)
        if not content and size != 0:
            self._raise_damage()
        return content

    def readline(self, size: int | None = -1, /) -> bytes:
        """The next line."""
        line = super().readline(size)
        if line[-1:] != b"\n" and size != 0 and len(line) != size:
            self._raise_damage()
        return line

    def _raise_damage(self) -> None:
        damage = cast(CarefulRaw, self.raw).damage
        if damage is not None:
            raise damage


class CarefulRaw(io.RawIOBase):
    """Anything with `read` as a raw stream that ends where reading fails and says why."""

    damage: BaseException | None = None

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        # A decompressor gives with `read1` what it has; with `read` it would lose that when the next block is bad.
        self._read = getattr(inner, "read1", None) or inner.read

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        """The next bytes; none at the end and from the damage on."""
        if self.damage is not None:
            return 0
        try:
            content = self._read(len(buffer))
        except DAMAGE as error:
            self.damage = error
            return 0
        buffer[: len(content)] = content
        return len(content)


def read_whole(file: BinaryIO, limit_bytes: int) -> bytes:
    """All of a stream, of which damage is raised; one byte more than the limit where there is more than that."""
    content = file.read(limit_bytes + 1)
    if len(content) <= limit_bytes:
        # The end of the stream, or of what can be read of it: asking again tells.
        file.read(1)
    return content
