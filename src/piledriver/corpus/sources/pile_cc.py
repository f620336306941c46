"""Pile-CC: web pages of Common Crawl."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.html.extractors import Extractor, extract_page
from piledriver.corpus.formats.html.page import decode_page, page_meta
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, one_piece, per_file
from piledriver.corpus.sources.shared.line_pieces import line_pieces, piece_lines
from piledriver.corpus.sources.shared.warc import WebPage, archive_pieces, is_web_archive, pages_of
from piledriver.corpus.text.language import language_of
from piledriver.corpus.text.normalise import NotTextError

_is_json_lines = ends_with(".jsonl", ".json", ".ndjson")
_is_html = ends_with(".html", ".htm", ".xhtml")
_HTML_KINDS = ("text/html", "application/xhtml+xml", "application/xhtml")


def _wants(name: str) -> bool:
    """Return whether it is a web archive, JSON lines of CCNet, or a page."""
    return is_web_archive(name) or _is_json_lines(name) or _is_html(name)


def _split(stream: RawStream) -> Iterator[Piece | Refusal]:
    """Yield ranges of a web archive or of JSON lines; a page is one piece."""
    if is_web_archive(stream.name):
        yield from archive_pieces(stream)
    elif _is_json_lines(stream.name):
        yield from line_pieces(stream)
    else:
        yield from one_piece(stream)


def _documents(piece: Piece, *, extractor: Extractor = "piledriver") -> Iterator[Found]:
    """Yield every English page of a piece."""
    if isinstance(piece.extra, int):
        yield from _json_documents(piece)
    elif piece.extra is None:
        yield _from_html(piece.read(), None, {"origin": piece.origin}, extractor)
    else:
        for page in pages_of(piece):
            yield page if isinstance(page, Refusal) else _from_page(page, extractor)


def _from_page(page: WebPage, extractor: Extractor) -> Found:
    if page.status is not None and not 200 <= page.status < 300:
        return Refusal("http status is not 2xx", page.origin, str(page.status))
    meta: dict[str, Any] = {"origin": page.origin, "url": page.url, "date": page.date or None}
    if page.truncated:
        meta["truncated"] = True
    if page.kind not in ("text/plain", *_HTML_KINDS) and not (
        not page.kind and page.content[:300].lstrip()[:1] == b"<"
    ):
        return Refusal("not html", page.origin, page.kind[:80])
    try:
        if page.kind == "text/plain":
            return _in_english(decode_page(page.content, page.charset), meta)
        return _from_html(page.content, page.charset, meta, extractor)
    except NotTextError as error:
        return Refusal(error.reason, page.origin, str(error))


def _from_html(content: bytes, charset: str | None, meta: dict[str, Any], extractor: Extractor) -> Found:
    html = decode_page(content, charset)
    return _in_english(extract_page(html, extractor), {**meta, **page_meta(html)})


def _in_english(text: str, meta: dict[str, Any]) -> Found:
    if not text.strip():
        return Refusal("no text", meta["origin"])
    language = language_of(text)
    if language != "en":
        return Refusal("not english", meta["origin"], language or "unknown language")
    return Document(text, meta={**meta, "language": language})


def _json_documents(piece: Piece) -> Iterator[Found]:
    for item in piece_lines(piece):
        if isinstance(item, Refusal):
            yield item
            continue
        place, line = item
        origin = f"{piece.origin}#{place}"
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            yield Refusal("invalid json", origin, str(error))
            continue
        yield _from_row(row, origin) if isinstance(row, dict) else Refusal("not an object", origin)


def _from_row(row: dict[str, Any], origin: str) -> Found:
    """Return the document of a row with the fields of CCNet, or as Dolma and RedPajama wrap them."""
    text = next((row[name] for name in ("raw_content", "text", "content") if isinstance(row.get(name), str)), None)
    if text is None:
        return Refusal("no text", origin)
    wrapped = [value for name in ("metadata", "meta") if isinstance(value := row.get(name), dict)]
    fields = {name: value for part in [*wrapped, row] for name, value in part.items()}
    names = ("url", "title", "date_download", "source_domain", "language", "language_score", "perplexity", "bucket")
    meta = {name: fields[name] for name in names if isinstance(fields.get(name), str | float | int)}
    url = meta.get("url")
    meta["origin"] = f"{origin} {url}" if url else origin
    if isinstance(meta.get("language"), str):
        # The crawler's detector saw the whole page, so its result is used.
        if meta["language"] != "en":
            return Refusal("not english", meta["origin"], meta["language"])
        return Document(text, meta=meta)
    return _in_english(text, meta)


SOURCE = Source(
    slug="pile-cc",
    name="Pile-CC",
    title="web pages of Common Crawl, in English",
    raw_format="WARC, WET or ARC (plain or compressed), CCNet JSON lines, or pages as HTML files",
    licence="unknown",
    consent="terms",
    treatment=(
        "Response and resource records with HTML or plain text and a 2xx status; WET conversions as they are. The "
        "encoding is what server, page or a detector says (the original gave up on many). The main content is found "
        "by piledriver's own extractor, which keeps tables, code and formulas; the original used justext, which "
        "loses half of a page. The language is told by cld2 from the extracted text, not from the HTML with its "
        "markup as in the original; what is not English is refused. Quality filter and deduplication are stages of "
        "the build, not of extraction. A licence that a page links to as its own is kept."
    ),
    citation="Gao et al. 2020, The Pile, arXiv:2101.00027; Common Crawl, commoncrawl.org",
    wants=_wants,
    pieces=per_file(_split),
    documents=_documents,
)
