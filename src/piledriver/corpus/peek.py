"""Look at the first bytes of a stream that cannot be rewound, without losing them."""

from __future__ import annotations

import io
from typing import BinaryIO, cast


def peeked(stream: BinaryIO, size: int) -> tuple[bytes, BinaryIO]:
    """The first bytes, and a stream that still starts with them.

    >>> head, stream = peeked(io.BytesIO(b"one two"), 3)
    >>> head, stream.read()
    (b'one', b'one two')
    """
    head = stream.read(size)
    return head, cast(BinaryIO, io.BufferedReader(_Joined(head, stream), 1 << 18))


class _Joined(io.RawIOBase):
    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        content = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._rest.close()
        super().close()
