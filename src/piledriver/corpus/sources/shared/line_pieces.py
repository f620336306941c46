"""Split files with one record a line for many workers: whole lines, read by the parent only where necessary."""

from __future__ import annotations

import os
from collections.abc import Iterator

from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Piece

PIECE_BYTES = 1 << 22
MAX_LINE_BYTES = 1 << 26
_BLOCK_BYTES = 1 << 18
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")


def line_pieces(stream: RawStream, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece | Refusal]:
    """Yield pieces of whole lines: ranges of a plain local file, a small compressed file whole, else blocks of bytes.

    `extra` is the position of the piece in the decompressed file.
    """
    if stream.path is not None:
        size = os.path.getsize(stream.path)
        with open(stream.path, "rb") as file:
            compressed = file.read(6).startswith(_COMPRESSED)
        if not compressed:
            yield from _ranges(stream, stream.path, size, piece_bytes)
            return
        if size <= piece_bytes:
            yield Piece(stream.origin, path=stream.path, extra=0)
            return
    yield from _blocks(stream, piece_bytes)


def piece_lines(piece: Piece, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes] | Refusal]:
    """Yield (position, line without its end) of each line that is not blank, or a refusal of too long a line."""
    place: int = piece.extra or 0
    # Only a whole file may be compressed; a range may begin with bytes that merely look compressed.
    whole_file = piece.path is not None and piece.length is None
    with piece.open() if whole_file else piece.open_raw() as stream:
        # The blocks of a long line are joined once.
        parts: list[bytes] = []
        waiting, skipping = 0, False
        while block := stream.read(_BLOCK_BYTES):
            *lines, tail = block.split(b"\n")
            for line in lines:
                if parts:
                    line = b"".join((*parts, line))
                    parts.clear()
                    waiting = 0
                if skipping:
                    skipping = False
                elif line.strip():
                    yield place, line.rstrip(b"\r")
                place += len(line) + 1
            parts.append(tail)
            waiting += len(tail)
            if waiting > max_bytes:
                if not skipping:
                    yield Refusal("line too long", f"{piece.origin}#{place}", f"more than {max_bytes} bytes")
                skipping = True
                place += waiting
                parts.clear()
                waiting = 0
        rest = b"".join(parts)
        if rest.strip() and not skipping:
            yield place, rest.rstrip(b"\r")


def _ranges(stream: RawStream, path: str, size: int, piece_bytes: int) -> Iterator[Piece]:
    start = 0
    with open(path, "rb") as file:
        while start < size:
            end = min(start + piece_bytes, size)
            file.seek(end)
            while end < size:
                block = file.read(_BLOCK_BYTES)
                found = block.find(b"\n")
                end = min(size, end + (found + 1 if found >= 0 else len(block)))
                if found >= 0 or not block:
                    break
            yield Piece(stream.origin, path=path, offset=start, length=end - start, extra=start)
            start = end


def _blocks(stream: RawStream, piece_bytes: int) -> Iterator[Piece | Refusal]:
    file = stream.file
    start, rest, skipping = 0, b"", False
    while block := file.read(piece_bytes):
        cut = block.rfind(b"\n") + 1
        if cut:
            content = rest + block[:cut]
            if skipping:
                first = content.index(b"\n") + 1
                start += first
                content, skipping = content[first:], False
            if content:
                yield Piece(stream.origin, data=content, extra=start)
            start += len(content)
            rest = block[cut:]
            continue
        rest += block
        if len(rest) > MAX_LINE_BYTES:
            if not skipping:
                yield Refusal("line too long", f"{stream.origin}#{start}", f"more than {MAX_LINE_BYTES} bytes")
            skipping = True
            start += len(rest)
            rest = b""
    if rest and not skipping:
        yield Piece(stream.origin, data=rest, extra=start)
