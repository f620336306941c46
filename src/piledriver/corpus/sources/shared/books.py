"""Documents of EPUB books, for the sources books3, bookcorpus2 and epub."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.epub import EpubError, read_epub
from piledriver.corpus.formats.gutenberg import without_boilerplate
from piledriver.corpus.formats.html.fast.convert import compile_scanner
from piledriver.corpus.sources.base import Documents, Found, Piece


def book_documents(piece: Piece, *, compiled: bool = False) -> Iterator[Found]:
    """Yield the book of an EPUB file as one document, or the refusal."""
    try:
        book = read_epub(piece.read(), compiled=compiled)
    except EpubError as error:
        yield Refusal(error.reason, piece.origin, str(error))
        return
    text = without_boilerplate("\n\n".join(chapter for chapter in book.chapters if chapter.strip()))
    if text.strip():
        yield Document(text, meta={"origin": piece.origin, **book.meta})
    else:
        yield Refusal("no text", piece.origin, f"{len(book.chapters)} chapters")


def compile_book_documents() -> Documents:
    """Return `book_documents` with the compiled scanner of chapters."""
    compile_scanner()
    return partial(book_documents, compiled=True)
