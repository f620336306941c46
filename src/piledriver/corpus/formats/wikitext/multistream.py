"""Multistream bzip2 dumps: thousands of bzip2 streams in one file, each with whole pages, that workers can open alone.

Where a stream starts is found in the bytes (its head and the mark of its first block are 80 bits that do not occur by
chance), so that the index file of the dump is not needed.
"""

from __future__ import annotations

import bz2
import re
from collections.abc import Iterator

_START = re.compile(rb"BZh[1-9]1AY&SY")
_CHUNK_BYTES = 1 << 23
_START_BYTES = 10


def stream_starts(path: str) -> Iterator[int]:
    """The offset of every bzip2 stream in a file, in one pass over its bytes."""
    with open(path, "rb") as file:
        offset, kept = 0, b""
        while chunk := file.read(_CHUNK_BYTES):
            window = kept + chunk
            for found in _START.finditer(window):
                yield offset - len(kept) + found.start()
            offset += len(chunk)
            kept = window[-(_START_BYTES - 1) :]


def is_multistream(path: str) -> bool:
    """Whether the second stream starts with a page: other tools write several streams too, but cut anywhere."""
    starts = stream_starts(path)
    first, second = next(starts, None), next(starts, None)
    if first != 0 or second is None:
        return False
    with open(path, "rb") as file:
        file.seek(second)
        try:
            head = bz2.BZ2Decompressor().decompress(file.read(1 << 20), 4096)
        except (OSError, ValueError):
            return False
    return head.lstrip().startswith((b"<page>", b"</mediawiki>"))


def stream_ranges(path: str, size: int, at_least_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of runs of whole streams."""
    begin = 0
    for start in stream_starts(path):
        if start - begin >= at_least_bytes:
            yield begin, start - begin
            begin = start
    if size > begin:
        yield begin, size - begin
