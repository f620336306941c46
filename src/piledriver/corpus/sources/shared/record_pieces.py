"""Split one long stream of records into pieces of a few megabytes that hold whole records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.limits import LimitError, damage_refusal
from piledriver.corpus.raw.partial_reads import DAMAGE
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Piece

PIECE_BYTES = 1 << 22
MAX_RECORD_BYTES = 1 << 26

LastCut = Callable[[bytes], int]
"""Return where the last complete record of a buffer ends, 0 without one."""


def record_pieces(stream: RawStream, last_cut: LastCut) -> Iterator[Piece | Refusal]:
    """Yield pieces of whole records: ranges of a plain local file, else bytes.

    A record larger than `MAX_RECORD_BYTES` is rejected and skipped, so that memory stays bounded.
    """
    file = stream.file
    # Only in a plain file do positions mean the same to a worker; a compressed stream is wrapped.
    local = stream.path is not None and getattr(file, "name", None) == stream.path
    buffer = b""
    at = 0
    with file:
        for block in _blocks(file):
            if isinstance(block, Exception):
                # The complete records before the damage are kept.
                yield damage_refusal(f"{stream.origin}#{at + len(buffer)}", block)
                buffer = buffer[: last_cut(buffer)]
                break
            buffer += block
            end = last_cut(buffer)
            if end > 0:
                yield _piece(stream, buffer[:end], at, local)
                at += end
                buffer = buffer[end:]
            elif len(buffer) > MAX_RECORD_BYTES:
                detail = f"a record of more than {MAX_RECORD_BYTES} bytes"
                yield Refusal(LimitError.reason, f"{stream.origin}#{at}", detail)
                at += len(buffer)
                buffer = b""
    if buffer.strip():
        yield _piece(stream, buffer, at, local)
    elif at == 0:
        yield Refusal("empty file", stream.origin)


def _blocks(file: BinaryIO) -> Iterator[bytes | Exception]:
    """Yield blocks of a few megabytes, then the error where the stream is damaged."""
    read = getattr(file, "read1", file.read)
    parts: list[bytes] = []
    size = 0
    try:
        while part := read(1 << 18):
            parts.append(part)
            size += len(part)
            if size >= PIECE_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
    except DAMAGE as error:
        yield b"".join(parts)
        yield error
        return
    if parts:
        yield b"".join(parts)


def _piece(stream: RawStream, content: bytes, at: int, local: bool) -> Piece:
    if local:
        return Piece(stream.origin, path=stream.path, offset=at, length=len(content))
    return Piece(stream.origin, data=content)
