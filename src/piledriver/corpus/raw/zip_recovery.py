"""Members of a zip archive that lost its directory, found by their own headers from the beginning.

The directory stands at the end, so a download that broke off has none; each member has a header of its own before its
content, which is enough to read those that are whole.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO, cast

from piledriver.corpus.raw.partial_reads import CarefulReader

_HEADER = struct.Struct("<4sHHHHHIIIHH")
_MARK = b"PK\x03\x04"
_DESCRIPTOR = b"PK\x07\x08"
_ENCRYPTED, _SIZES_FOLLOW, _UTF8 = 1, 8, 0x800
_STORED, _DEFLATED = 0, 8
_BLOCK_BYTES = 1 << 16
_UNKNOWN = 0xFFFFFFFF


class MemberError(ValueError):
    """A member that cannot be read; `name` says which."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(why)
        self.name = name


def scanned_members(file: BinaryIO) -> Iterator[tuple[str, BinaryIO] | MemberError]:
    """(name, content) of each member in order, to be read before the next; an error in the place of one that is not
    readable. What can not be skipped because its length is not known ends the search.
    """
    at = 0
    while True:
        file.seek(at)
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or header[:4] != _MARK:
            return
        _, _, flags, method, _, _, crc, packed, _, name_length, extra_length = _HEADER.unpack(header)
        raw_name = file.read(name_length)
        name = raw_name.decode("utf-8" if flags & _UTF8 else "cp437", "replace")
        extra = file.read(extra_length)
        if packed == _UNKNOWN:
            packed = _long_size(extra)
        start = at + _HEADER.size + name_length + extra_length
        follows = bool(flags & _SIZES_FOLLOW) and not packed
        if flags & _ENCRYPTED or method not in (_STORED, _DEFLATED) or (follows and method == _STORED):
            yield MemberError(name, "encrypted" if flags & _ENCRYPTED else f"compression method {method}")
            if follows:
                return
            at = start + packed
            continue
        member = _Member(file, start, None if follows else packed, method == _DEFLATED, None if follows else crc)
        if not name.endswith("/"):
            yield name, cast(BinaryIO, CarefulReader(member, _BLOCK_BYTES))
        end = member.drained()
        if end is None:
            return
        at = end + _descriptor_length(file, end) if flags & _SIZES_FOLLOW else end


def _long_size(extra: bytes) -> int:
    """The packed size from the extra field of an archive of more than 4 GB."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and length >= 16 and at + 20 <= len(extra):
            return int(struct.unpack_from("<Q", extra, at + 12)[0])
        at += 4 + length
    return _UNKNOWN


def _descriptor_length(file: BinaryIO, at: int) -> int:
    """The checksum and sizes that stand behind a member, with or without a mark, in 4 or 8 bytes each."""
    file.seek(at)
    content = file.read(28)
    marked = 4 if content.startswith(_DESCRIPTOR) else 0
    return next((marked + size for size in (12, 20) if content[marked + size :][:2] == b"PK"), marked + 12)


class _Member(io.RawIOBase):
    """The content of one member; what is wrong with it is kept in `damage`, as `CarefulReader` wants it."""

    def __init__(self, file: BinaryIO, start: int, packed: int | None, deflated: bool, crc: int | None) -> None:
        self.damage: BaseException | None = None
        self._file, self._at, self._crc_wanted = file, start, crc
        self._left = packed
        self._inflate = zlib.decompressobj(-15) if deflated else None
        self._rest, self._crc, self._ended = b"", 0, False

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        """The next bytes; none at the end and from the damage on."""
        while not self._rest and not self._ended and self.damage is None:
            try:
                self._rest = self._more(len(buffer))
            except (zlib.error, EOFError, OSError) as error:
                self.damage = error
        given = self._rest[: len(buffer)]
        self._rest = self._rest[len(given) :]
        buffer[: len(given)] = given
        return len(given)

    def _more(self, size: int) -> bytes:
        waiting = self._inflate.unconsumed_tail if self._inflate is not None else b""
        if not waiting:
            self._file.seek(self._at)
            waiting = self._file.read(_BLOCK_BYTES if self._left is None else min(_BLOCK_BYTES, self._left))
            self._at += len(waiting)
            if self._left is not None:
                self._left -= len(waiting)
        content = waiting if self._inflate is None else self._inflate.decompress(waiting, size)
        self._crc = zlib.crc32(content, self._crc)
        if self._inflate is not None and self._inflate.eof:
            self._at -= len(self._inflate.unused_data) if self._left is None else 0
            self._ended = True
        elif self._left == 0 and self._inflate is None:
            self._ended = True
        elif not waiting:
            raise EOFError("the archive ends inside of this member")
        if self._ended and self._crc_wanted is not None and self._crc != self._crc_wanted:
            raise EOFError("wrong checksum")
        return content

    def drained(self) -> int | None:
        """Where the member ends, once all of it was read; None where that cannot be known."""
        while not self._ended and self.damage is None:
            self._rest = b""
            self.readinto(bytearray(_BLOCK_BYTES))
        if self._left is not None:
            return self._at + self._left
        return self._at if self._ended else None
