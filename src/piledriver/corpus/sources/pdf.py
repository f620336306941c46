"""PDF files: one file, one document."""

from __future__ import annotations

from collections.abc import Iterator

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.pdf.lines import metadata
from piledriver.corpus.formats.pdf.text import pdf_to_text
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, one_piece, per_file


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield the text layer of the file."""
    content = piece.read()
    text = pdf_to_text(content)
    if not text.strip():
        yield Refusal("no text layer", piece.origin, "pages are images: run OCR first")
        return
    yield Document(text, meta={"origin": piece.origin, **metadata(content)})


SOURCE = Source(
    slug="pdf",
    name="PDF",
    title="PDF files, one document each",
    raw_format="PDF with a text layer, alone or in archives",
    licence="yours",
    consent="yours",
    treatment=(
        "The text layer as pdfium reads it, in the order of the file: running headers, footers, page numbers and text "
        "up the margin removed, words hyphenated at line ends joined (or kept, where the rest of the document writes "
        "the hyphen), ligatures resolved, lines joined to paragraphs across columns and pages. Refused: damaged, "
        "encrypted, or without a text layer."
    ),
    wants=ends_with(".pdf"),
    pieces=per_file(one_piece),
    documents=_documents,
)
