"""gzip unpacked up to the very byte where it is damaged.

The standard library's reader loses, with a damaged byte, everything that the same call had unpacked before it: some
hundred kilobytes of good records, or dozens of small files of a tar archive.
"""

from __future__ import annotations

import zlib
from typing import BinaryIO

_BLOCK_BYTES = 1 << 16
_STEPS = (512, 16, 1)


class Gunzip:
    """The content of a gzip stream of any number of members, by `read1`; damage is raised after all before it came.

    >>> import gzip, io
    >>> Gunzip(io.BytesIO(gzip.compress(b"one ") + gzip.compress(b"two"))).read1(100)
    b'one '
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._inflate = zlib.decompressobj(31)
        self._packed, self._begun = b"", False
        self._damage: Exception | None = None

    def read1(self, size: int) -> bytes:
        """At most so many bytes; none at the end."""
        while True:
            if self._damage is not None:
                raise self._damage
            if self._inflate.eof:
                # What writers of tapes fill up with is no member.
                self._packed = self._inflate.unused_data.lstrip(b"\x00")
                self._inflate, self._begun = zlib.decompressobj(31), False
            packed = self._packed or self._file.read(_BLOCK_BYTES)
            if not self._begun:
                packed = packed.lstrip(b"\x00")
            if not packed:
                if self._begun:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                if not self._file.read(1):
                    return b""
                raise zlib.error("something that is no gzip follows")
            self._begun = True
            content = self._unpacked(packed, size)
            if content:
                return content

    def _unpacked(self, packed: bytes, size: int) -> bytes:
        before = self._inflate.copy()
        try:
            content = self._inflate.decompress(packed, size)
        except zlib.error as error:
            self._damage = error
            # As much as the call would have given without the damage, had it not come to it.
            return _salvaged(before, packed, size)
        self._packed = self._inflate.unconsumed_tail
        return content

    def close(self) -> None:
        """Nothing of its own to close."""


def _salvaged(inflate: zlib._Decompress, packed: bytes, limit: int) -> bytes:
    """What comes before the damage: a little of the packed bytes at a time, then less, down to the bad one."""
    parts: list[bytes] = []
    found = at = 0
    for size in _STEPS:
        while at < len(packed) and found < limit:
            before = inflate.copy()
            try:
                parts.append(inflate.decompress(packed[at : at + size]))
            except zlib.error:
                inflate = before
                break
            found += len(parts[-1])
            at += size
    return b"".join(parts)[:limit]
