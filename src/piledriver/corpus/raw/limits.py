"""Limits on reading: the size of one value, and how far compressed data may expand.

Every reader of compressed data checks while it reads, so a compression bomb has the same reason in any format and is
rejected before it fills memory or a disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

from piledriver.corpus.document import Refusal, RejectedError

# Text compresses 3 to 20 times, rarely 100; a larger ratio, or terabytes, are meant to fill a disk or memory.
# No ratio is checked below the grace, so that a small file of repeated lines is read.
MAX_EXPANSION = 500
EXPANSION_GRACE_BYTES = 1 << 27
MAX_STREAM_BYTES = 1 << 42


class LimitError(RejectedError):
    """More bytes than a limit allows."""

    reason = "too large"


class CompressionBombError(LimitError):
    """Compressed data that expands more than text can."""

    reason = "compression bomb"


def is_bomb(length: int, packed: int) -> bool:
    """Return whether `packed` bytes that expand to `length` are more than text can."""
    return length > min(max(EXPANSION_GRACE_BYTES, MAX_EXPANSION * packed), MAX_STREAM_BYTES)


@dataclass
class Expansion:
    """What the members of one file, in archives at any depth, expand to together.

    A bomb may have many members of which none is one, all of them made of the same compressed bytes. So the sum is
    compared with the bytes of the file itself, not with the compressed sizes that its members declare.
    """

    packed: int
    unpacked: int = 0

    @property
    def is_bomb(self) -> bool:
        """Whether the members read so far are more than text can expand to."""
        return is_bomb(self.unpacked, self.packed)

    def add(self, length: int) -> None:
        """Count a member, unless it is a bomb by itself: that one was rejected alone, and the others are read."""
        if not is_bomb(length, self.packed):
            self.unpacked += length


def read_at_most(file: BinaryIO, limit_bytes: int) -> bytes:
    """Return all bytes of a stream, raising any damage; one byte more than the limit where the stream is longer."""
    content = file.read(limit_bytes + 1)
    if len(content) <= limit_bytes:
        # At the end, or at damage? The next read tells.
        file.read(1)
    return content


def read_all(file: BinaryIO, limit_bytes: int, advice: str = "") -> bytes:
    """Return all bytes of a stream, raising any damage; raise `LimitError`, with the advice, above the limit."""
    content = read_at_most(file, limit_bytes)
    if len(content) > limit_bytes:
        raise LimitError(f"more than {limit_bytes} bytes" + (f"; {advice}" if advice else ""))
    return content


def reason_of(error: BaseException, otherwise: str = "damaged data") -> str:
    """Return the refusal reason for a read error."""
    if isinstance(error, RejectedError):
        return error.reason
    forbidden = isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError)
    return "no permission to read" if forbidden else otherwise


def damage_refusal(origin: str, error: BaseException, otherwise: str = "damaged data") -> Refusal:
    """Return the refusal of a file that cannot be read, or not to its end."""
    detail = str(error) if isinstance(error, RejectedError) else f"{type(error).__name__}: {error}"
    return Refusal(reason_of(error, otherwise), origin, detail[:500])
