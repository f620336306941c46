"""HTML pages: one file, one document."""

from __future__ import annotations

from collections.abc import Iterator

from piledriver.corpus.document import Document
from piledriver.corpus.formats.html.extractors import Extractor, extract_page
from piledriver.corpus.formats.html.page import decode_page, page_meta
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, one_piece, per_file


def _documents(piece: Piece, *, extractor: Extractor = "piledriver") -> Iterator[Found]:
    """Yield the main content of the page."""
    html = decode_page(piece.read())
    yield Document(extract_page(html, extractor), meta={"origin": piece.origin, **page_meta(html)})


SOURCE = Source(
    slug="html",
    name="HTML",
    title="web pages as files, one document each",
    raw_format="HTML or XHTML files, alone, compressed or in archives",
    licence="yours",
    consent="yours",
    treatment=(
        "The encoding is what the page or a detector says. The main content is kept: headings, paragraphs, lists, "
        "tables, code, formulas; navigation, advertisements and footers are not. Title, language and a licence that "
        "the page links to as its own are kept in meta."
    ),
    wants=ends_with(".html", ".htm", ".xhtml", ".shtml"),
    pieces=per_file(one_piece),
    documents=_documents,
)
