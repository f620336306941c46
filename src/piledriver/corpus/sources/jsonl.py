"""JSON lines: one object a line, the text in one of its fields."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.limits import read_all
from piledriver.corpus.raw.partial_reads import peek_head
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, per_file
from piledriver.corpus.sources.shared.line_pieces import line_pieces, piece_lines
from piledriver.corpus.sources.shared.rows import record_document

_ARRAY_BYTES = 1 << 27
_INVALID = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def _split(stream: RawStream) -> Iterator[Piece | Refusal]:
    """Yield pieces of whole lines; an array, which is read whole, is one piece."""
    head, opened = peek_head(stream.file, 64)
    if head.lstrip().startswith(b"[") or stream.name.lower().endswith(".json"):
        advice = "an array is read whole: write one object a line and call the file .jsonl"
        yield Piece(stream.origin, data=read_all(opened, _ARRAY_BYTES, advice))
    else:
        yield from line_pieces(RawStream(stream.origin, stream.name, stream.path, opened))


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield one document for each line, or each item of an array, that holds an object with text."""
    if piece.extra is None:
        try:
            value = msgspec.json.decode(piece.data or b"")
        except _INVALID:
            # Neither an array nor a single object: perhaps JSON lines.
            pass
        else:
            if not isinstance(value, list):
                yield record_document(value, piece.origin)
                return
            for number, record in enumerate(value):
                yield record_document(record, f"{piece.origin}#{number}")
            return
    for item in piece_lines(piece):
        yield item if isinstance(item, Refusal) else _decoded(item[1], f"{piece.origin}@{item[0]}")


def _decoded(line: bytes, where: str) -> Found:
    try:
        record = msgspec.json.decode(line.removeprefix(b"\xef\xbb\xbf"))
    except _INVALID as error:
        return Refusal("invalid json", where, str(error)[:200])
    return record_document(record, where)


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
