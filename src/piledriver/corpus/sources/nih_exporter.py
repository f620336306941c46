"""NIH ExPorter: abstracts of funded research projects."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import BinaryIO

import msgspec

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, group_by_size, stop_at_damage
from piledriver.corpus.text.normalise import NotTextError, decode_text

BATCH_BYTES = 1 << 21
MAX_LINE_BYTES = 1 << 22
MAX_FIELD = 1 << 23
_IDS = ("APPLICATION_ID", "APPLICATIONID", "APPL_ID")
_TEXTS = ("ABSTRACT_TEXT", "ABSTRACT", "PROJECT_ABSTRACT")
Record = tuple[str, str, str]
"""Application id, abstract, origin."""
# Ids below this have a bit each; the few others go to a set.
_BITS = 1 << 26
_WORD = r"(?:project|program|overall|core|research|technical|proposal|candidate|administrative|component)"
_NAME = r"(?:project\s+narrative|description|summary|abstract|narrative)"
_HEADER = re.compile(
    rf"\s*(?:modified\s+|revised\s+)?(?:{_WORD}\s+)?{_NAME}(?:\s*(?:/|and|&|or|\s)\s*(?:{_WORD}\s+)?{_NAME})?(?:\s+section)?(?:\s+of\s+(?:the\s+)?(?:project|proposal))?"
    r"\s*(?:\([^()]{0,120}\)\s*[:.\-–—]*|[:]+|[-–—]{1,3}(?=\s)|\.?[ \t]*\r?\n)"
    r"|\s*\((?:provided|verbatim|adapted|taken|as\s+adapted|applicant|investigator|from|scanned)[^()]{0,120}\)\s*[:.\-–—]*",
    re.IGNORECASE,
)
_CAPITALS = re.compile(
    r"\s*(?:PROJECT |OVERALL |PROGRAM )?(?:DESCRIPTION|SUMMARY|ABSTRACT)"
    r"(?:\s*/?\s*(?:PROJECT )?(?:ABSTRACT|SUMMARY))?\s+(?=[A-Z][a-z])"
)
_NOTHING = re.compile(
    r"\W*(?:no\s+(?:abstract|description)(?:\s+(?:is|was))?(?:\s+(?:available|provided))?|n/?a|none|not\s+(?:available|provided)|"
    r"abstract\s+(?:not\s+(?:available|provided)|unavailable)|unavailable|tbd|x+)?\W*",
    re.IGNORECASE,
)


def _pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
    """Read the tables, reject records whose id or text occurred before, and yield batches of the rest.

    Duplicates span files and years, so one process must see every record; it keeps a bit for each id and a hash of
    each text.
    """
    seen_ids, seen_texts = _Ids(), set[int]()

    def judged(record: Record | Refusal) -> Record | Refusal:
        if isinstance(record, Refusal):
            return record
        number, text, origin = record
        if not seen_ids.add(number):
            return Refusal("duplicate application id", origin)
        text = clean_abstract(text)
        if _NOTHING.fullmatch(text):
            return Refusal("no abstract", origin)
        digest = int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
        if digest in seen_texts:
            return Refusal("duplicate text", origin)
        seen_texts.add(digest)
        return number, text, origin

    for stream in streams:
        records = map(judged, stop_at_damage(stream.origin, _records(stream)))
        for batch in group_by_size(records, lambda record: len(record[1]), BATCH_BYTES):
            yield batch if isinstance(batch, Refusal) else Piece(stream.origin, data=msgspec.msgpack.encode(batch))


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield the records of a batch."""
    assert piece.data is not None, "pieces of this source carry their records"
    for number, text, origin in msgspec.msgpack.decode(piece.data, type=list[Record]):
        yield Document(text, meta={"origin": origin, "application_id": number})


def clean_abstract(text: str) -> str:
    """Return an abstract with white space collapsed, without the headings that forms print above it.

    >>> clean_abstract("DESCRIPTION (provided by applicant):  We  study\\n mice.")
    'We study mice.'
    >>> clean_abstract("PROJECT SUMMARY/ABSTRACT\\nMice."), clean_abstract("Description of mice is hard.")
    ('Mice.', 'Description of mice is hard.')
    """
    text = text.replace("[unreadable]", " ").lstrip("? \t\r\n")
    for _ in range(3):
        found = _HEADER.match(text) or _CAPITALS.match(text)
        if found is None or not found.end():
            break
        text = text[found.end() :]
    return " ".join(text.split())


def _records(stream: RawStream) -> Iterator[Record | Refusal]:
    csv.field_size_limit(MAX_FIELD)
    with stream.file as file:
        rows = csv.reader(_lines(file))
        columns: tuple[int, int] | None = None
        while True:
            try:
                row = next(rows)
            except StopIteration:
                if columns is None:
                    yield Refusal("no abstract column", stream.origin, "the table is empty")
                return
            except csv.Error as error:
                yield Refusal("invalid csv", f"{stream.origin}#line {rows.line_num}", str(error))
                continue
            if not row:
                continue
            if columns is None:
                columns = _columns(row)
                if columns is None:
                    yield Refusal("no abstract column", stream.origin, ", ".join(row)[:200])
                    return
                continue
            if len(row) <= max(columns):
                yield Refusal("invalid csv", f"{stream.origin}#line {rows.line_num}", f"{len(row)} fields")
                continue
            number, text = row[columns[0]].strip(), row[columns[1]]
            origin = f"{stream.origin}#{number or f'line {rows.line_num}'}"
            try:
                yield number, _decoded(text), origin
            except NotTextError as error:
                yield Refusal(error.reason, origin)


def _lines(file: BinaryIO) -> Iterator[str]:
    """Yield lines as text with bytes that are not UTF-8 escaped; a very long line comes in parts."""
    first = True
    while line := file.readline(MAX_LINE_BYTES):
        if first:
            line, first = line.removeprefix(b"\xef\xbb\xbf"), False
        yield line.decode("utf-8", "surrogateescape").replace("\x00", "")


def _decoded(text: str) -> str:
    # Files of the years before 2008 are in Windows-1252, some records in both encodings.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return decode_text(text.encode("utf-8", "surrogateescape"), "cp1252")
    return text


def _columns(row: list[str]) -> tuple[int, int] | None:
    names = [name.strip().upper().replace(" ", "_") for name in row]
    number = next((names.index(name) for name in _IDS if name in names), None)
    text = next((names.index(name) for name in _TEXTS if name in names), None)
    return None if number is None or text is None else (number, text)


class _Ids:
    """The ids seen, as a bit each, so that millions of them take megabytes."""

    def __init__(self) -> None:
        self._bits = bytearray(_BITS // 8)
        self._others: set[str] = set()

    def add(self, number: str) -> bool:
        """Add an id; return whether it is new. An empty id is always new."""
        if not number:
            return True
        if number.isascii() and number.isdecimal() and len(number) < 9 and int(number) < _BITS:
            byte, bit = divmod(int(number), 8)
            if self._bits[byte] >> bit & 1:
                return False
            self._bits[byte] |= 1 << bit
            return True
        if number in self._others:
            return False
        self._others.add(number)
        return True


SOURCE = Source(
    slug="nih-exporter",
    name="NIH ExPorter",
    title="abstracts of research projects funded by the NIH",
    raw_format="RePORTER project abstracts: CSV, zipped by year",
    licence="public-domain",
    consent="author",
    treatment=(
        "An abstract is a document: white space collapsed, headers such as DESCRIPTION (provided by applicant): "
        "removed. A record whose APPLICATION_ID or whose text came before, in any file, is refused; so are empty ones "
        "and those that say only that no abstract is available. Old files are in Windows-1252: their bytes are "
        "decoded, not dropped as by the original."
    ),
    wants=ends_with(".csv"),
    pieces=_pieces,
    documents=_documents,
    citation="https://reporter.nih.gov/exporter",
)
