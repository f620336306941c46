"""Files of mail to pieces, and pieces to documents: what the sources of mail share."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.mail.message import UnreadableError, body_text, meta_of, split_headers
from piledriver.corpus.raw.lines import bounded_lines
from piledriver.corpus.raw.partial_reads import DAMAGE, read_all
from piledriver.corpus.raw.peek import peek_head
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Found, Piece, damage_refusal, ends_with, stop_at_damage
from piledriver.corpus.sources.shared.mbox import mbox_pieces, messages_in

BATCH_MESSAGES = 200
BATCH_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 26

Raw = tuple[str, bytes | None, str | None]
_is_table = ends_with(".csv")


def mail_pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
    """mbox and CSV files cut into batches; single messages, of which there are half a million, put into batches."""
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
    """The pieces of a file of many messages, or the one message that a file is, with its size."""
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
            if len(content) > MAX_MESSAGE_BYTES:
                yield Refusal("message too large", stream.origin, f"more than {MAX_MESSAGE_BYTES} bytes")
            else:
                yield (stream.origin, content, None), len(content)


def csv_pieces(stream: BinaryIO, origin: str) -> Iterator[Piece | Refusal]:
    """A table with one raw message in each row."""
    csv.field_size_limit(MAX_MESSAGE_BYTES)
    refused: list[Refusal] = []

    def lines() -> Iterator[str]:
        for line in bounded_lines(stream, origin):
            if isinstance(line, Refusal):
                refused.append(line)
            else:
                yield line.decode("utf-8", "surrogateescape")

    batch: list[Raw] = []
    held = 0
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
            content = row[message_at].encode("utf-8", "surrogateescape")
            batch.append((f"{origin}#{name}", content, None))
            held += len(content)
            if held >= BATCH_BYTES:
                yield Piece(origin, extra=batch, length=held)
                batch, held = [], 0
    except DAMAGE as error:
        yield Refusal("damaged table", origin, f"{type(error).__name__}: {error}"[:500])
    yield from refused
    if batch:
        yield Piece(origin, extra=batch, length=held)


def mail_documents(piece: Piece) -> Iterator[Found]:
    """Every message of a piece."""
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
    """One message: its body as text, its headers as meta."""
    try:
        part = split_headers(raw)
    except UnreadableError as error:
        return Refusal("not a message", origin, str(error))
    if part.headers.get("subject", "").upper().endswith("FOLDER INTERNAL DATA"):
        return Refusal("folder data", origin, "what a mail program keeps in its mbox files")
    text = body_text(part)
    if not text.strip():
        return Refusal("no text in the body", origin)
    meta: dict[str, Any] = {"origin": origin, **meta_of(part.headers)}
    return Document(text, meta=meta)
