"""Look at the first bytes of a stream that cannot seek, without consuming them."""

from __future__ import annotations

from typing import BinaryIO, cast

from piledriver.corpus.raw.partial_reads import PartialRaw, PartialReader


def peek_head(stream: BinaryIO, size: int) -> tuple[bytes, BinaryIO]:
    """Return the first bytes, and a stream that still starts with them.

    >>> import io
    >>> head, stream = peek_head(io.BytesIO(b"one two"), 3)
    >>> head, stream.read()
    (b'one', b'one two')
    """
    head = stream.read(size)
    return head, cast(BinaryIO, PartialReader(_Joined(head, stream), 1 << 18))


class _Joined(PartialRaw):
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
