"""Read gzip up to the very byte that is damaged.

At a damaged byte the standard library's reader loses everything that the same call had decompressed before it: some
hundred kilobytes of intact records, or dozens of small files of a tar archive.
"""

from __future__ import annotations

import zlib
from typing import BinaryIO

_BLOCK_BYTES = 1 << 16
_STEPS = (512, 16, 1)


class GzipReader:
    """The content of a gzip stream with any number of members; raises only after all bytes before the damage.

    >>> import gzip, io
    >>> GzipReader(io.BytesIO(gzip.compress(b"one ") + gzip.compress(b"two"))).read1(100)
    b'one '
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._inflate = zlib.decompressobj(31)
        self._packed, self._begun = b"", False
        self._damage: Exception | None = None

    def read1(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end."""
        while True:
            if self._damage is not None:
                raise self._damage
            if self._inflate.eof:
                # Tape writers pad with zeros.
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
                raise zlib.error("the data after the last gzip member is not gzip")
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
            # No more than the call would have returned without the damage.
            return _salvaged(before, packed, size)
        self._packed = self._inflate.unconsumed_tail
        return content

    def close(self) -> None:
        """Do nothing: the file belongs to the caller."""


def _salvaged(inflate: zlib._Decompress, packed: bytes, limit: int) -> bytes:
    """Return the bytes before the damage by decompressing ever smaller steps up to the bad byte."""
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
