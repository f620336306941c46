"""Git packs: an index from object ids to offsets, and objects that may be deltas of others."""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import Literal

MAX_OBJECT_BYTES = 1 << 26
_MAX_DELTAS = 5000
_KINDS = {1: "commit", 2: "tree", 3: "blob", 4: "tag"}
_OFFSET_DELTA, _REFERENCE_DELTA = 6, 7

Kind = Literal["commit", "tree", "blob", "tag"]


class DamagedError(ValueError):
    """The repository is damaged."""


def inflate(data: bytes | memoryview, size: int) -> bytes:
    """Return exactly `size` bytes of a zlib stream; raise `DamagedError` for more (a bomb) or less."""
    if size > MAX_OBJECT_BYTES:
        raise DamagedError(f"object of {size} bytes is too large")
    try:
        content = zlib.decompressobj().decompress(data, size + 1)
    except zlib.error as error:
        raise DamagedError(str(error)) from None
    if len(content) != size:
        raise DamagedError(f"object has not the {size} bytes that its header declares")
    return content


class Pack:
    """One `.pack` with its `.idx`."""

    def __init__(self, index_path: str, hash_bytes: int) -> None:
        self._hash_bytes = hash_bytes
        self._index = _mapped(index_path)
        self._data = _mapped(index_path.removesuffix(".idx") + ".pack")
        self._version_2 = self._index[:4] == b"\xfftOc"
        self._fan_out = 8 if self._version_2 else 0
        if len(self._index) < self._fan_out + 1024 or self._data[:4] != b"PACK":
            raise DamagedError("not a pack")
        self._count = self._fan(255)

    def _fan(self, byte: int) -> int:
        return int(struct.unpack_from(">I", self._index, self._fan_out + 4 * byte)[0])

    def find(self, object_id: bytes) -> int | None:
        """Return the offset of an object in the pack, or `None`."""
        low = self._fan(object_id[0] - 1) if object_id[0] else 0
        high = self._fan(object_id[0])
        table = self._fan_out + 1024
        step = self._hash_bytes if self._version_2 else self._hash_bytes + 4
        skip = 0 if self._version_2 else 4
        while low < high:
            middle = (low + high) // 2
            at = table + middle * step + skip
            here = self._index[at : at + self._hash_bytes]
            if here == object_id:
                return self._offset(middle, at)
            if here < object_id:
                low = middle + 1
            else:
                high = middle
        return None

    def _offset(self, number: int, at: int) -> int:
        if not self._version_2:
            return int(struct.unpack_from(">I", self._index, at - 4)[0])
        table = self._fan_out + 1024 + self._count * (self._hash_bytes + 4)
        offset = int(struct.unpack_from(">I", self._index, table + 4 * number)[0])
        if offset & 0x80000000:
            large = table + 4 * self._count + 8 * (offset & 0x7FFFFFFF)
            return int(struct.unpack_from(">Q", self._index, large)[0])
        return offset

    def read(self, offset: int) -> tuple[Kind | bytes, bytes, list[bytes]]:
        """Return (kind, content, deltas to apply last to first); the kind is the id of a base in another pack."""
        deltas: list[bytes] = []
        while len(deltas) < _MAX_DELTAS:
            kind, size, at = self._header(offset)
            if kind in _KINDS:
                return _KINDS[kind], self._inflate(at, size), deltas  # type: ignore[return-value]
            if kind == _OFFSET_DELTA:
                back, at = self._back(at)
                if not 0 < back <= offset:
                    raise DamagedError("delta offset outside the pack")
                deltas.append(self._inflate(at, size))
                offset -= back
            elif kind == _REFERENCE_DELTA:
                base = self._data[at : at + self._hash_bytes]
                deltas.append(self._inflate(at + self._hash_bytes, size))
                found = self.find(base)
                if found is None:
                    return base, b"", deltas
                offset = found
            else:
                raise DamagedError(f"unknown object kind {kind}")
        raise DamagedError("endless chain of deltas")

    def _header(self, at: int) -> tuple[int, int, int]:
        byte = self._byte(at)
        kind, size, shift = (byte >> 4) & 7, byte & 15, 4
        while byte & 0x80:
            at += 1
            byte = self._byte(at)
            size |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise DamagedError("object size without end")
        return kind, size, at + 1

    def _back(self, at: int) -> tuple[int, int]:
        byte = self._byte(at)
        back = byte & 0x7F
        while byte & 0x80:
            at += 1
            byte = self._byte(at)
            back = ((back + 1) << 7) | (byte & 0x7F)
            if back > len(self._data):
                raise DamagedError("delta offset outside the pack")
        return back, at + 1

    def _inflate(self, at: int, size: int) -> bytes:
        # Compressed data is at most a little longer than its content.
        return inflate(self._data[at : at + size + (size >> 8) + 1024], size)

    def _byte(self, at: int) -> int:
        if at >= len(self._data):
            raise DamagedError("truncated pack")
        return self._data[at]


def apply_delta(base: bytes, delta: bytes) -> bytes:
    """Return the object that a delta makes of its base."""
    base_size, at = _delta_size(delta, 0)
    size, at = _delta_size(delta, at)
    if base_size != len(base) or size > MAX_OBJECT_BYTES:
        raise DamagedError("delta does not match its base")
    out: list[bytes] = []
    made = 0
    try:
        while at < len(delta):
            command = delta[at]
            at += 1
            if command & 0x80:
                offset = length = 0
                for bit in range(4):
                    if command & (1 << bit):
                        offset |= delta[at] << (8 * bit)
                        at += 1
                for bit in range(3):
                    if command & (16 << bit):
                        length |= delta[at] << (8 * bit)
                        at += 1
                part = base[offset : offset + (length or 0x10000)]
            elif command:
                part = delta[at : at + command]
                at += command
            else:
                raise DamagedError("unknown command in a delta")
            made += len(part)
            if made > size:
                break
            out.append(part)
    except IndexError:
        raise DamagedError("truncated delta") from None
    if made != size:
        raise DamagedError("delta result has not the declared size")
    return b"".join(out)


def _delta_size(delta: bytes, at: int) -> tuple[int, int]:
    size = shift = 0
    while at < len(delta) and shift < 64:
        byte = delta[at]
        at += 1
        size |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return size, at
        shift += 7
    raise DamagedError("truncated delta")


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise DamagedError(f"{path} is empty") from None
