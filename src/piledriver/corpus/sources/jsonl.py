"""JSON lines: one object a line, the text in one of its fields."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO, cast

import msgspec

from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.lines import MAX_LINE_BYTES, bounded_lines
from piledriver.corpus.raw.partial_reads import DAMAGE, read_all
from piledriver.corpus.raw.peek import peek_head
from piledriver.corpus.raw.streams import FileRange, RawStream
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, per_file
from piledriver.corpus.sources.shared.rows import record_document

RANGE_BYTES = 1 << 24
BATCH_BYTES = 1 << 22
_ARRAY_BYTES = 1 << 27


def _split(stream: RawStream) -> Iterator[Piece | Refusal]:
    """Yield ranges of a plain file, which workers align with its lines, or batches of lines of any other."""
    head, opened = peek_head(stream.file, 64)
    with opened:
        if head.lstrip().startswith(b"[") or stream.name.lower().endswith(".json"):
            content = read_all(opened, _ARRAY_BYTES)
            if len(content) > _ARRAY_BYTES:
                detail = "an array is read whole; write one object a line and call the file .jsonl"
                yield Refusal("too large", stream.origin, detail)
            else:
                yield Piece(stream.origin, data=content, extra="whole")
            return
        if stream.path is not None:
            with open(stream.path, "rb") as raw:
                uncompressed = raw.read(64) == head
            if uncompressed:
                for offset in range(0, os.path.getsize(stream.path), RANGE_BYTES):
                    yield Piece(stream.origin, path=stream.path, offset=offset, length=RANGE_BYTES, extra="range")
                return
        yield from _batches(opened, stream.origin)


def _batches(opened: BinaryIO, origin: str) -> Iterator[Piece | Refusal]:
    batch: list[bytes] = []
    held = offset = 0
    try:
        for line in bounded_lines(opened, origin):
            if isinstance(line, Refusal):
                yield line
                continue
            batch.append(line)
            held += len(line)
            if held >= BATCH_BYTES:
                yield Piece(origin, data=b"".join(batch), extra=offset)
                offset += held
                batch, held = [], 0
    except DAMAGE as error:
        yield Refusal("damaged file", origin, f"{type(error).__name__}: {error}")
    if batch:
        yield Piece(origin, data=b"".join(batch), extra=offset)


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield one document for each line that holds an object with text."""
    if piece.extra == "whole":
        yield from _whole(piece)
        return
    if piece.extra == "range":
        assert piece.path is not None
        assert piece.length is not None
        # A line belongs to the range that it starts in; the byte before the range tells whether one starts there.
        start = max(0, piece.offset - 1)
        opened = cast(BinaryIO, FileRange(piece.path, start))
        with opened:
            at = start
            if piece.offset:
                # A line that spans the whole range belongs to an earlier one: stop there.
                at += _skip_line(opened, piece.length + 1)
            yield from _lines(opened, piece.origin, at, piece.offset + piece.length)
        return
    with piece.open_raw() as opened:
        yield from _lines(opened, piece.origin, piece.extra, None)


def _lines(opened: BinaryIO, origin: str, at: int, end: int | None) -> Iterator[Found]:
    while end is None or at < end:
        line = opened.readline(MAX_LINE_BYTES)
        if not line:
            return
        where = f"{origin}@{at}"
        at += len(line)
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            at += _skip_line(opened)
            yield Refusal("line too long", where, f"more than {MAX_LINE_BYTES} bytes")
        elif line.strip():
            yield _decoded(line, where)


def _skip_line(opened: BinaryIO, enough: int | None = None) -> int:
    skipped = 0
    while rest := opened.readline(1 << 20):
        skipped += len(rest)
        if rest.endswith(b"\n") or (enough is not None and skipped > enough):
            break
    return skipped


def _decoded(line: bytes, where: str) -> Found:
    try:
        record = msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return Refusal("invalid json", where, str(error)[:200])
    return record_document(record, where)


def _whole(piece: Piece) -> Iterator[Found]:
    """Yield the documents of a JSON array or a single object; where it is neither, of JSON lines."""
    try:
        value = msgspec.json.decode(piece.data or b"")
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        with piece.open_raw() as opened:
            yield from _lines(opened, piece.origin, 0, None)
        return
    if isinstance(value, list):
        for number, record in enumerate(value):
            yield record_document(record, f"{piece.origin}#{number}")
    else:
        yield record_document(value, piece.origin)


SOURCE = Source(
    slug="jsonl",
    name="JSON Lines",
    title="JSON lines of one's own or of other corpora",
    raw_format="one JSON object a line (.jsonl, .ndjson), plain or compressed, also Pile shards; or one JSON array",
    licence="yours",
    consent="yours",
    treatment=(
        "The text is the first of the usual fields (text, content, body, ...), a string or a list of paragraphs; "
        "all other fields become meta. A plain file is cut into byte ranges that workers align with its lines. "
        "Lines that are not JSON, hold no text or pass 64 MB are refused one by one."
    ),
    wants=ends_with(".jsonl", ".ndjson", ".jl", ".json"),
    pieces=per_file(_split),
    documents=_documents,
)
