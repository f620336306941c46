"""mbox files: many messages one after the other, each after a line that starts with `From `."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.partial_reads import DAMAGE
from piledriver.corpus.sources.base import Piece, damage_refusal

BATCH_BYTES = 1 << 21
MAX_MESSAGE_BYTES = 1 << 26

# A separator has a time in it, and a blank line before it: a sentence that starts with "From " has not both.
_SEPARATOR = re.compile(rb"(?:\A|(?<=\n\n)|(?<=\r\n\r\n))From [^\n]{0,200}?\d\d:\d\d[^\n]{0,100}\n")
_QUOTED = re.compile(rb"(?m)^>(>*From )")


def mbox_pieces(stream: BinaryIO, origin: str) -> Iterator[Piece | Refusal]:
    """Batches of whole messages; `extra` is the number of the first one in the file."""
    buffer = b""
    number = 0
    while True:
        try:
            chunk = stream.read(BATCH_BYTES)
        except DAMAGE as error:
            # The message that the damage cuts is the last one of the buffer.
            yield damage_refusal(f"{origin}#{number}", error)
            return
        if not chunk:
            break
        buffer += chunk
        starts = [found.start() for found in _SEPARATOR.finditer(buffer)]
        if len(starts) > 1:
            yield Piece(origin, data=buffer[: starts[-1]], extra=number)
            number += len(starts) - 1
            buffer = buffer[starts[-1] :]
        elif len(buffer) > MAX_MESSAGE_BYTES:
            yield Refusal("message too large", f"{origin}#{number}", f"more than {MAX_MESSAGE_BYTES} bytes")
            buffer = b""
            number += 1
    if buffer.strip():
        yield Piece(origin, data=buffer, extra=number)


def messages_in(content: bytes) -> Iterator[bytes]:
    """The raw messages of a batch, without their separators."""
    starts = [(found.start(), found.end()) for found in _SEPARATOR.finditer(content)] or [(0, 0)]
    ends = [start for start, _ in starts[1:]] + [len(content)]
    for (_, begin), end in zip(starts, ends, strict=True):
        message = content[begin:end]
        yield _QUOTED.sub(rb"\1", message) if b">From " in message else message
