"""FreeLaw: opinions of American courts, from CourtListener."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterator
from typing import Any

import msgspec
from lxml import etree

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.html.convert import parse_html, remove_element
from piledriver.corpus.formats.html.render import render
from piledriver.corpus.raw.partial_reads import peek_head
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, group_by_size, one_piece, per_file
from piledriver.corpus.sources.shared.line_pieces import line_pieces, piece_lines

# The best last: a later field that is not empty is made from the earlier ones, or from better print.
_FIELDS = str.split("plain_text html html_lawbox html_columbia html_anon_2020 html_with_citations xml_harvard")
_UNREADABLE = "Unable to extract the content from this file. Please try reading the original."
_is_csv, _is_json, _is_json_lines = ends_with(".csv"), ends_with(".json"), ends_with(".jsonl", ".ndjson")
_PIECE_BYTES = 1 << 20
_HEAD_BYTES = 1 << 22
_MAX_FIELD_BYTES = 1 << 26
# Postgres with `ESCAPE '\'` writes a quotation mark as `\"`; where marks are doubled, `\"` only ends a field.
_BACKSLASH_ESCAPES = re.compile(rb"\\\"[^\",\r\n]")
# Harvard's elements that stand for blocks.
_HARVARD_BLOCK = re.compile(
    r"<(/?)(?:casebody|headmatter|opinion|author|parties|attorneys|judges|summary|syllabus|headnotes|docketnumber|"
    r"decisiondate|otherdate|court|citation|history|correction|disposition|footnote)\b"
)
# Notes: where one is called for, and the note itself with its number, as Harvard and CourtListener write them.
_NOTE_MARK = re.compile(r"<footnotemark\b[^<>]{0,100}>\s{0,9}([^<>\s]{1,8})\s{0,9}</footnotemark>")
_NOTE_LINK = re.compile(r"<a\b(?=[^<>]{0,200}class=\"footnote\")[^<>]{0,200}>([^<>\s]{1,8})</a>")
_NOTE_BLOCK = re.compile(r"<footnote\b[^<>]{0,100}label=\"([^\"<>]{1,8})\"[^<>]{0,100}>\s{0,99}(<p\b[^<>]{0,200}>)?")
_NOTE = re.compile(
    r"(<div\b[^<>]{0,100}class=\"footnote\"[^<>]{0,100}>)\s{0,99}<a\b[^<>]{0,200}>([^<>\s]{1,8})</a>\s{0,99}"
    r"(<p\b[^<>]{0,200}>)?"
)
# A word that continues after a page mark.
_WORD_ACROSS_PAGES = re.compile(
    r"-(?<=[a-z]-)\s{0,9}(<(?:page-number\b[^<>]{0,200}|(?:span|a)\b[^<>]{0,200}pag(?:e-|ination)[^<>]{0,200})>"
    r"[^<>]{0,20}</[a-z-]+>)\s{0,9}(?=[a-z])"
)
_page_marks = etree.XPath(
    "//page-number | //@class[contains(.,'star-pagination') or contains(.,'page-number') or .='page-label'"
    " or .='num']"
    "/parent::*[not(self::div)]"
)
_PAGE_NUMBER = re.compile(r"\n[ \t]{0,90}-?[ \t]{0,9}(?:Page )?\d{1,4}(?: of \d{1,4})?[ \t]{0,9}-?[ \t]{0,90}(?=\n*\f)")
_COMPOUND = re.compile(r"\b[A-Za-z]{1,40}-[A-Za-z]{1,40}\b")
_BROKEN_WORD = re.compile(r"\b([A-Za-z]{0,39}[a-z])-\n([ \t]{0,60})([a-z]{1,40})([^\s\w-]{0,4})[ \t]{0,3}(?=[^\s-])")
# CourtListener sets plain text between citations in `<pre class="inline">`, which is no block: it is plain text still.
_PLAIN_WITH_CITATIONS = re.compile(r"\s{0,99}(?:<div>\s{0,99})?<pre class=[\"']inline[\"']>")
_ANY_TAG = re.compile(r"</?[a-zA-Z][^<>]{0,4000}>")
_JURISDICTION = re.compile(r"/(?:jurisdiction|courts)/([\w-]{1,40})/?$")


def _wants(name: str) -> bool:
    """Return whether it holds opinions as JSON (one a file or a line) or CourtListener's bulk CSV."""
    lowered = name.lower()
    if _is_csv(name):
        return "opinion" in lowered and "cluster" not in lowered and "joined" not in lowered
    return _is_json(name) or _is_json_lines(name)


def _split(stream: RawStream) -> Iterator[Piece | Refusal]:
    """Yield a JSON file whole, ranges of JSON lines, batches of CSV rows."""
    if _is_csv(stream.name):
        for batch in group_by_size(_rows(stream), lambda row: sum(map(len, row.values())), _PIECE_BYTES):
            yield batch if isinstance(batch, Refusal) else Piece(stream.origin, data=msgspec.json.encode(batch))
    elif _is_json_lines(stream.name):
        yield from line_pieces(stream)
    else:
        yield from one_piece(stream)


def _rows(stream: RawStream) -> Iterator[dict[str, str] | Refusal]:
    head, content = peek_head(stream.file, _HEAD_BYTES)
    escaped = _BACKSLASH_ESCAPES.search(head) is not None
    text = io.TextIOWrapper(content, encoding="utf-8", errors="replace", newline="")
    previous = csv.field_size_limit(_MAX_FIELD_BYTES)
    try:
        rows = csv.DictReader(text, escapechar="\\" if escaped else None, doublequote=not escaped)
        if not set(_FIELDS).intersection(rows.fieldnames or ()):
            yield Refusal("no opinion columns", stream.origin, ", ".join(rows.fieldnames or ())[:200])
            return
        while True:
            try:
                row = next(rows, None)
            except csv.Error as error:
                yield Refusal("invalid csv", f"{stream.origin}#line {rows.line_num}", str(error))
                continue
            if row is None:
                break
            # Cells beyond the header, and fields that the row lacks, are no strings.
            yield {name: value for name, value in row.items() if name and isinstance(value, str) and value}
    finally:
        csv.field_size_limit(previous)


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield each opinion of a piece."""
    if piece.extra is None:
        yield from _decoded(piece.read(), piece.origin)
        return
    for item in piece_lines(piece):
        if isinstance(item, Refusal):
            yield item
        else:
            yield from _decoded(item[1], f"{piece.origin}#{item[0]}")


def _decoded(content: bytes, origin: str) -> Iterator[Found]:
    try:
        value = msgspec.json.decode(content.removeprefix(b"\xef\xbb\xbf"))
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        yield Refusal("invalid json", origin, str(error)[:200])
        return
    if isinstance(value, dict) and isinstance(value.get("results"), list):
        value = value["results"]
    opinions = value if isinstance(value, list) else [value]
    for opinion in opinions:
        if not isinstance(opinion, dict):
            yield Refusal("not an opinion", origin, str(opinion)[:100])
            continue
        number = opinion.get("id")
        yield _opinion(opinion, origin if len(opinions) == 1 or number is None else f"{origin}#{number}")


def _opinion(opinion: dict[str, Any], origin: str) -> Found:
    name, markup = "", ""
    for field in _FIELDS:
        value = opinion.get(field)
        if isinstance(value, str) and value.strip():
            if _UNREADABLE in value:
                return Refusal("unable to extract", origin, field)
            name, markup = field, value
    if not name:
        known = any(field in opinion for field in _FIELDS)
        return Refusal("no text" if known else "not an opinion", origin)
    if _PLAIN_WITH_CITATIONS.match(markup):
        name, markup = f"{name} of plain_text", html.unescape(_ANY_TAG.sub("", markup))
    text = _plain(markup) if name.endswith("plain_text") else _marked_up(markup)
    if not text.strip():
        return Refusal("no text", origin, name)
    return Document(text, meta={"origin": origin, "field": name, **_meta(opinion, origin)})


def _marked_up(markup: str) -> str:
    if "<footnote" in markup:
        markup = _NOTE_MARK.sub(r"[\1]", _NOTE_BLOCK.sub(r"<div>\2[\1] ", markup))
    if 'class="footnote"' in markup:
        markup = _NOTE_LINK.sub(r"[\1]", _NOTE.sub(r"\1\3[\2] ", markup))
    if "-<" in markup or "- <" in markup or "-\n" in markup:
        markup = _WORD_ACROSS_PAGES.sub(r"\1", markup)
    if "<opinion" in markup or "<casebody" in markup or "<author" in markup:
        markup = _HARVARD_BLOCK.sub(r"<\1div", markup)
    tree = parse_html(markup)
    if tree is None:
        return " ".join(markup.split())
    # Page marks of the reporter occur inside sentences; paragraph numbers are alone in a line.
    for element in _page_marks(tree):
        remove_element(element)
    return render(tree)


def _plain(text: str) -> str:
    """Return the text of a PDF without page numbers."""
    text = text.replace("\r\n", "\n")
    text = _PAGE_NUMBER.sub("\n", text).replace("\f", "\n") if "\f" in text else text
    return without_hyphenation(text)


def without_hyphenation(text: str) -> str:
    """Return the text with words hyphenated at line ends joined, on the line where they begin.

    A hyphen that the word has elsewhere in the text is its own.

    >>> without_hyphenation("a corpo-\\n   ration, and well-\\nknown is well-known")
    'a corporation,\\n   and well-\\nknown is well-known'
    """
    if "-\n" not in text:
        return text
    compounds = {found.lower() for found in _COMPOUND.findall(text)}

    def joined(found: re.Match[str]) -> str:
        before, margin, after, behind = found.groups()
        if f"{before}-{after}".lower() in compounds:
            return found[0]
        return f"{before}{after}{behind}\n{margin}"

    return _BROKEN_WORD.sub(joined, text)


def _meta(opinion: dict[str, Any], origin: str) -> dict[str, Any]:
    citation = opinion.get("citation")
    cited: dict[str, Any] = citation if isinstance(citation, dict) else {}
    court = opinion.get("court") or opinion.get("court_id")
    found = _JURISDICTION.search(court) if isinstance(court, str) else None
    archive = re.search(r"([\w-]{1,40})\.tar(?:\.\w{2,3})?![^!]*$", origin)
    jurisdiction = (
        found[1] if found else court if isinstance(court, str) and len(court) < 40 else archive and archive[1]
    )
    cites = [cited[name] for name in sorted(cited) if "cite" in name and isinstance(cited[name], str) and cited[name]]
    url = opinion.get("absolute_url")
    meta = {
        "case_id": opinion.get("id"),
        "case_jurisdiction": jurisdiction,
        "case_name": cited.get("case_name") or opinion.get("case_name"),
        "docket_number": cited.get("docket_number") or opinion.get("docket_number"),
        "citations": cites or None,
        "judges": opinion.get("judges") or opinion.get("author_str") or None,
        "date_filed": opinion.get("date_filed"),
        "date_created": opinion.get("date_created"),
        "cluster": opinion.get("cluster") or opinion.get("cluster_id"),
        "type": opinion.get("type"),
        "url": f"https://www.courtlistener.com{url}" if isinstance(url, str) and url.startswith("/") else None,
        "ocr": True if opinion.get("extracted_by_ocr") in (True, "t", "true") else None,
    }
    return {name: value for name, value in meta.items() if isinstance(value, str | int | list) and value != ""}


SOURCE = Source(
    slug="freelaw",
    name="FreeLaw",
    title="opinions of American courts, from CourtListener",
    raw_format="CourtListener's opinions as JSON (files, lines, tar of tars by court) or bulk CSV (opinions-*.csv.bz2)",
    licence="public-domain",
    consent="author",
    treatment=(
        "One opinion, one document. Of its forms the last that is not empty is taken, in the order plain text, "
        "HTML, Lawbox, Columbia, anonymised, with citations, Harvard's XML, as the original does in effect. "
        "Headings, paragraphs, quotations, footnotes and tables are kept; the marks of where a reporter's page "
        "begins are not. Opinions that CourtListener could not extract are refused. Case name, court, docket, "
        "citations and dates are kept where the record has them; the bulk CSV has only the number of the cluster "
        "that does."
    ),
    citation="Free Law Project, CourtListener, courtlistener.com",
    wants=_wants,
    pieces=per_file(_split),
    documents=_documents,
)
