"""PhilPapers: open-access philosophy, as OAI-PMH records and the PDFs that they describe."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.html.convert import fragment_to_text
from piledriver.corpus.formats.jats.inline import flat
from piledriver.corpus.formats.pdf.pile_filter import filtered
from piledriver.corpus.formats.pdf.text import pdf_to_text
from piledriver.corpus.formats.xml.entities import with_character_entities
from piledriver.corpus.formats.xml.parse import XmlError, parse_xml, strip_namespaces
from piledriver.corpus.raw.limits import damage_refusal, read_all
from piledriver.corpus.raw.partial_reads import DAMAGE
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, one_piece, stop_at_damage
from piledriver.corpus.sources.shared.record_pieces import MAX_RECORD_BYTES, record_pieces
from piledriver.corpus.text.creative_commons import licence_id

MIN_CHARACTERS = 1000
_RECORD = re.compile(rb"<record[\s>]")
_END_OF_RECORD = re.compile(rb"</record\s*>")
_ONLY_CLOSING = re.compile(rb"(?:\s|</[\w:.-]+\s*>|<resumptionToken[^<>]*>[^<>]*(?=<)|<resumptionToken[^<>]*/>)*")
# Two patterns with fixed replacements: many times as fast as one with a group.
_START_PREFIX = re.compile(rb"<[A-Za-z_][\w.-]*:")
_END_PREFIX = re.compile(rb"</[A-Za-z_][\w.-]*:")
_WITH_PREFIXED = re.compile(rb"<[\w.-]+\s[^<>]{0,2000}?\w:\w[^<>]{0,9000}>")
_PREFIXED = re.compile(rb"\s[A-Za-z_][\w.-]*:[\w.-]+\s*=\s*(?:\"[^\"<]*\"|'[^'<]*')")
_NAMES = r"(?:p|br|i|b|u|em|strong|sub|sup|span|div|a|ul|ol|li|blockquote|h[1-6]|jats:[a-z]{1,12})"
_HTML_TAG = re.compile(rf"</?{_NAMES}(?:\s+[a-z-]+=[^<>]{{0,200}})?\s?/?>", re.IGNORECASE)
_NO_TAG = re.compile(rf"<(?!/?{_NAMES}(?:\s+[a-z-]+=[^<>]{{0,200}})?\s?/?>)", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:#\d{1,7}|#x[0-9a-fA-F]{1,6}|[a-zA-Z]{2,8});")
_LISTS = str.split("creator subject identifier type relation contributor rights source publisher format")
# Names of the same fields in qualified Dublin Core and in arXiv's own formats.
_OTHER_NAMES = {
    "abstract": "description", "license": "rights", "author": "creator", "created": "date", "issued": "date",
}  # fmt: skip


def _pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
    """Yield each PDF with the record of the same name that follows it, other records a few megabytes at a time."""
    waiting: Piece | None = None
    for stream in streams:
        stem = os.path.splitext(stream.origin)[0]
        if waiting is not None and os.path.splitext(waiting.origin)[0] == stem and not _is_pdf(stream.origin):
            try:
                record: bytes | None = read_all(stream.file, MAX_RECORD_BYTES)
            except DAMAGE as error:
                record = None
                yield damage_refusal(stream.origin, error)
            yield Piece(waiting.origin, data=waiting.data, path=waiting.path, extra=record)
            waiting = None
            continue
        if waiting is not None:
            yield waiting
            waiting = None
        if not _is_pdf(stream.origin):
            yield from stop_at_damage(stream.origin, record_pieces(stream, _last_end))
            continue
        for piece in stop_at_damage(stream.origin, one_piece(stream)):
            if isinstance(piece, Piece):
                waiting = piece
            else:
                yield piece
    if waiting is not None:
        yield waiting


def _is_pdf(origin: str) -> bool:
    return origin.lower().endswith(".pdf")


def _last_end(buffer: bytes) -> int:
    found = buffer.rfind(b"</record>")
    return found + len(b"</record>") if found >= 0 else 0


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield the text of a PDF, or title and abstract of each record."""
    if _is_pdf(piece.origin):
        yield _paper(piece)
        return
    content = piece.read()
    at, number = 0, 0
    while found := _RECORD.search(content, at):
        end = _END_OF_RECORD.search(content, found.end())
        at = end.end() if end else len(content)
        number += 1
        yield _parsed(content[found.start() : at], piece.origin, f"{piece.offset + found.start()}")
    if number == 0 and not _ONLY_CLOSING.fullmatch(content):
        yield from _without_records(content, piece.origin)


def _parsed(record: bytes, origin: str, number: str) -> Found:
    """Return the document of one record, parsed alone without its prefixes, which the response declares."""
    bare = _END_PREFIX.sub(b"</", _START_PREFIX.sub(b"<", record))
    # Few tags have attributes with a prefix; searching every tag for them takes longer than parsing.
    bare = _WITH_PREFIXED.sub(lambda tag: _PREFIXED.sub(b"", tag[0]), bare)
    try:
        root = parse_xml(with_character_entities(bare))
    except XmlError as error:
        return Refusal("invalid xml", f"{origin}#{number}", str(error))
    strip_namespaces(root)
    return _record(root, origin, number)


def _without_records(content: bytes, origin: str) -> Iterator[Found]:
    """Yield the refusals of an error response, or the document of a bare oai_dc element."""
    try:
        root = parse_xml(with_character_entities(content))
    except XmlError as error:
        yield Refusal("invalid xml", origin, str(error))
        return
    strip_namespaces(root)
    for reported in root.iter("error"):
        yield Refusal("oai error", origin, f"{reported.get('code', '')}: {flat(reported)}")
    if root.tag == "dc":
        yield _record(root, origin, "1")


def _paper(piece: Piece) -> Found:
    text = filtered(pdf_to_text(piece.read()))
    if len(text) < MIN_CHARACTERS:
        return Refusal("shorter than 1000 characters", piece.origin, f"{len(text)}")
    meta: dict[str, Any] = {}
    if piece.extra is not None:
        with suppress(XmlError):
            root = parse_xml(with_character_entities(piece.extra))
            strip_namespaces(root)
            meta = _meta(_fields(root))
    return Document(text, meta={**meta, "origin": piece.origin})


def _record(record: Any, origin: str, number: str) -> Found:
    header = record.find("header")
    identifier = flat(header.find("identifier")) if header is not None and header.find("identifier") is not None else ""
    origin = f"{origin}#{identifier or number}"
    if header is not None and header.get("status") == "deleted":
        return Refusal("deleted record", origin)
    fields = _fields(record)
    # arXiv and others put remarks on the number of pages there too.
    abstracts = [text for text in fields.get("description", ()) if not text.startswith("Comment:")]
    if not abstracts:
        return Refusal("no abstract", origin)
    return Document("\n\n".join([*fields.get("title", [])[:1], *abstracts]), meta={**_meta(fields), "origin": origin})


def _without_markup(text: str) -> str:
    """Return the text of a field that may be HTML, escaped once more than XML needs; other uses of `<` stay.

    >>> _without_markup("First &quot;one&quot;.<br/>Second <i>two</i>, a<b and c>d")
    'First "one".\\nSecond two, a<b and c>d'
    """
    if _HTML_TAG.search(text):
        return fragment_to_text(_NO_TAG.sub("&lt;", text))
    return html.unescape(text) if _ENTITY.search(text) else text


def _fields(record: Any) -> dict[str, list[str]]:
    """Return the texts of a record's elements by name, without those of its header."""
    fields: dict[str, list[str]] = {}
    for element in record.iter("title", "description", "date", "language", *_LISTS, *_OTHER_NAMES):
        parent = element.getparent()
        text = flat(element)
        if "&" in text or "<" in text:
            text = _without_markup(text)
        if text and (parent is None or parent.tag != "header"):
            fields.setdefault(_OTHER_NAMES.get(element.tag, element.tag), []).append(text)
    return fields


def _meta(fields: dict[str, list[str]]) -> dict[str, Any]:
    meta: dict[str, Any] = {name: fields[name][0] for name in ("title", "date", "language") if name in fields}
    for name in _LISTS:
        # `source` is reserved for the name of this source.
        meta["dc_source" if name == "source" else name] = fields.get(name, [])
    meta["url"] = next((value for value in meta["identifier"] if value.startswith("http")), None)
    meta["licence"] = next((found for value in meta["rights"] if (found := licence_id(value))), None)
    return {name: value for name, value in meta.items() if value}


SOURCE = Source(
    slug="philpapers",
    name="PhilPapers",
    title="open-access papers of philosophy",
    raw_format="OAI-PMH answers (oai_dc XML) and PDFs, a PDF and its record under one name",
    licence="mixed open access, per document where the record says it",
    consent="author",
    treatment=(
        "A PDF is a document: its text layer (see the source pdf) through the Pile's filter, which drops paragraphs "
        "that are copyright notices, page numbers, mostly (cid:n) marks or mostly not letters; papers shorter than "
        "1000 characters are refused. A record without its PDF gives title and abstract. Loose accents are dropped, "
        "but a letter with its accent stays, which the original's decomposition lost. The fields of oai_dc become "
        "meta. Refused: deleted records, records without abstract, error answers, damaged or encrypted PDFs."
    ),
    wants=ends_with(".xml", ".pdf"),
    pieces=_pieces,
    documents=_documents,
    citation="https://philpapers.org/help/oai.html",
)
