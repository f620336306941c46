"""EPUB books, for the sources books3, bookcorpus2 and epub."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.epub import read_epub
from piledriver.corpus.formats.gutenberg import without_boilerplate
from piledriver.corpus.formats.html.fast.convert import compile_scanner
from piledriver.corpus.sources.base import Documents, Found, Piece, Source, ends_with, one_piece, per_file

_TREATMENT = (
    "The chapters in the order of the spine, one book a document: headings, paragraphs, lists, tables, verse and notes "
    "as a reader sees them; pictures, navigation, cover, imprint and colophon are left out, and so are the header and "
    "licence of Project Gutenberg. Books under digital rights management are refused. Title, author, language and "
    "rights come from the package; rights that name a licence become the licence of the document."
)


def book_source(*, before: str = "", after: str = "", **card: Any) -> Source:
    """Return a source of EPUB books; `before` and `after` extend the description of the treatment."""
    return Source(
        raw_format="EPUB 2 and 3",
        treatment=f"{before} {_TREATMENT} {after}".strip(),
        wants=ends_with(".epub"),
        pieces=per_file(one_piece),
        compile=_compile,
        documents=_documents,
        **card,
    )


def _documents(piece: Piece, *, compiled: bool = False) -> Iterator[Found]:
    """Yield the book of an EPUB file as one document, or the refusal."""
    book = read_epub(piece.read(), compiled=compiled)
    text = without_boilerplate("\n\n".join(chapter for chapter in book.chapters if chapter.strip()))
    if text.strip():
        yield Document(text, meta={"origin": piece.origin, **book.meta})
    else:
        yield Refusal("no text", piece.origin, f"{len(book.chapters)} chapters")


def _compile() -> Documents:
    """Return `documents` with the compiled scanner of chapters."""
    compile_scanner()
    return partial(_documents, compiled=True)
