"""Members of a zip archive without its directory, found by their own headers from the beginning.

The directory is at the end of the file, so a truncated download has none; `stream-unzip` reads the members that precede
the cut. It cannot skip a member: the first one that is damaged, encrypted or compressed by an unknown method ends the
recovery. An archive with a directory is read by `zipfile`, which skips them.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import BinaryIO, cast

from stream_unzip import MissingPasswordError, TruncatedDataError, UnzipError, stream_unzip

from piledriver.corpus.raw.partial_reads import PartialReader

_BLOCK_BYTES = 1 << 16


class EncryptedMemberError(ValueError):
    """The next member needs a password."""


def recovered_members(file: BinaryIO) -> Iterator[tuple[str, BinaryIO]]:
    """Yield (name, content) of each member in order, to be read before the next; end at the first unreadable one.

    Raise `EncryptedMemberError` where that one is encrypted, `OSError` where it is damaged.
    """
    file.seek(0)
    try:
        for name, _, blocks in stream_unzip(iter(lambda: file.read(_BLOCK_BYTES), b""), chunk_size=_BLOCK_BYTES):
            if not name.endswith(b"/"):
                yield _decoded(name), cast(BinaryIO, PartialReader(_Member(blocks), _BLOCK_BYTES))
            for _ in blocks:
                pass
    except MissingPasswordError as error:
        raise EncryptedMemberError("a password is needed") from error
    except TruncatedDataError:
        return
    except UnzipError as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _decoded(name: bytes) -> str:
    # The flag that says UTF-8 is not reported; names in CP437 are rarely valid UTF-8.
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode("cp437")


class _Member(io.RawIOBase):
    """The content of one member; an error is kept in `damage`, where `PartialReader` looks for it."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self.damage: BaseException | None = None
        self._blocks, self._rest = blocks, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        if not self._rest and self.damage is None:
            try:
                self._rest = next(self._blocks, b"")
            except UnzipError as error:
                self.damage = OSError(f"{type(error).__name__}: {error}")
        given = self._rest[: len(buffer)]
        self._rest = self._rest[len(given) :]
        buffer[: len(given)] = given
        return len(given)
