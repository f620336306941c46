"""Files of mail (single messages, mbox, CSV tables) to pieces, and pieces to documents."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.mail.message import UnreadableError, body_text, meta_of, split_headers
from piledriver.corpus.raw.limits import LimitError, damage_refusal, read_all
from piledriver.corpus.raw.lines import bounded_lines
from piledriver.corpus.raw.partial_reads import DAMAGE, peek_head
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Found, Piece, ends_with, group_by_size, stop_at_damage
from piledriver.corpus.text.normalise import NotTextError

BATCH_MESSAGES = 200
BATCH_BYTES = 1 << 20
MBOX_BATCH_BYTES = 1 << 21
MAX_MESSAGE_BYTES = 1 << 26

Raw = tuple[str, bytes | None, str | None]
"""Origin, and the content or the path of a message."""
_is_table = ends_with(".csv")
# A separator holds a time and follows a blank line; a sentence that starts with "From " does not have both.
_SEPARATOR = re.compile(rb"(?:\A|(?<=\n\n)|(?<=\r\n\r\n))From [^\n]{0,200}?\d\d:\d\d[^\n]{0,100}\n")
_QUOTED = re.compile(rb"(?m)^>(>*From )")


def mail_pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
    """Yield batches of messages: of mbox and CSV files by size, of single messages also by count."""
    batch: list[Raw] = []
    held = 0
    for stream in streams:
        for found in stop_at_damage(stream.origin, _read(stream)):
            if isinstance(found, tuple):
                message, size = found
                batch.append(message)
                held += size
            else:
                yield found
        if len(batch) >= BATCH_MESSAGES or held >= BATCH_BYTES:
            yield Piece(batch[0][0], extra=batch, length=held)
            batch, held = [], 0
    if batch:
        yield Piece(batch[0][0], extra=batch, length=held)


def _read(stream: RawStream) -> Iterator[Piece | Refusal | tuple[Raw, int]]:
    """Yield the pieces of a file of many messages, or the message of a single one with its size."""
    head, opened = peek_head(stream.file, 5)
    with opened:
        if _is_table(stream.name):
            yield from csv_pieces(opened, stream.origin)
        elif head == b"From " and not stream.name.lower().endswith(".eml"):
            yield from mbox_pieces(opened, stream.origin)
        elif stream.path is not None:
            yield (stream.origin, None, stream.path), os.path.getsize(stream.path)
        else:
            content = read_all(opened, MAX_MESSAGE_BYTES)
            yield (stream.origin, content, None), len(content)


def csv_pieces(stream: BinaryIO, origin: str) -> Iterator[Piece | Refusal]:
    """Yield batches of the messages of a table with one raw message in each row."""
    for batch in group_by_size(_rows(stream, origin), lambda message: len(message[1] or b""), BATCH_BYTES):
        if isinstance(batch, Refusal):
            yield batch
        else:
            yield Piece(origin, extra=batch, length=sum(len(content or b"") for _, content, _ in batch))


def _rows(stream: BinaryIO, origin: str) -> Iterator[Raw | Refusal]:
    csv.field_size_limit(MAX_MESSAGE_BYTES)
    refused: list[Refusal] = []

    def lines() -> Iterator[str]:
        for line in bounded_lines(stream, origin):
            if isinstance(line, Refusal):
                refused.append(line)
            else:
                yield line.decode("utf-8", "surrogateescape")

    rows = csv.reader(lines())
    try:
        header = [name.strip().lower() for name in next(rows, [])]
        if "message" not in header:
            yield Refusal("no message column", origin, ", ".join(header)[:200])
            return
        message_at, file_at = header.index("message"), header.index("file") if "file" in header else -1
        for number, row in enumerate(rows, 1):
            if len(row) <= message_at:
                yield Refusal("short row", f"{origin}#{number}")
                continue
            name = row[file_at] if 0 <= file_at < len(row) and row[file_at] else str(number)
            yield f"{origin}#{name}", row[message_at].encode("utf-8", "surrogateescape"), None
    except DAMAGE as error:
        yield damage_refusal(origin, error, "damaged table")
    yield from refused


def mbox_pieces(stream: BinaryIO, origin: str) -> Iterator[Piece | Refusal]:
    """Yield batches of whole messages of an mbox file; `extra` is the number of the first one in the file."""
    buffer = b""
    number = 0
    while True:
        try:
            chunk = stream.read(MBOX_BATCH_BYTES)
        except DAMAGE as error:
            # The damage cuts the last message of the buffer.
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
            yield Refusal(LimitError.reason, f"{origin}#{number}", f"more than {MAX_MESSAGE_BYTES} bytes")
            buffer = b""
            number += 1
    if buffer.strip():
        yield Piece(origin, data=buffer, extra=number)


def messages_in(content: bytes) -> Iterator[bytes]:
    """Yield the raw messages of a batch, without their separators."""
    starts = [(found.start(), found.end()) for found in _SEPARATOR.finditer(content)] or [(0, 0)]
    ends = [start for start, _ in starts[1:]] + [len(content)]
    for (_, begin), end in zip(starts, ends, strict=True):
        message = content[begin:end]
        yield _QUOTED.sub(rb"\1", message) if b">From " in message else message


def mail_documents(piece: Piece) -> Iterator[Found]:
    """Yield every message of a piece."""
    if isinstance(piece.extra, int):
        for number, raw in enumerate(messages_in(piece.data or b""), piece.extra):
            yield read_message(raw, f"{piece.origin}#{number}")
        return
    batch: list[Raw] = piece.extra
    for origin, content, path in batch:
        if content is None:
            try:
                content = Piece(origin, path=path).read(MAX_MESSAGE_BYTES)
            except DAMAGE as error:
                yield damage_refusal(origin, error)
                continue
        yield read_message(content, origin)


def read_message(raw: bytes, origin: str) -> Found:
    """Return the document of a message: its body as text, its headers as meta."""
    try:
        part = split_headers(raw)
    except UnreadableError as error:
        return Refusal("not a message", origin, str(error))
    if part.headers.get("subject", "").upper().endswith("FOLDER INTERNAL DATA"):
        return Refusal("folder data", origin, "a record that mail programs keep in their mbox files")
    try:
        text = body_text(part)
    except NotTextError as error:
        return Refusal(error.reason, origin, str(error))
    if not text.strip():
        return Refusal("no text in the body", origin)
    meta: dict[str, Any] = {"origin": origin, **meta_of(part.headers)}
    return Document(text, meta=meta)
