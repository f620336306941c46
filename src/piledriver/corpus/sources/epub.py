"""EPUB books: one file, one document."""

from __future__ import annotations

from piledriver.corpus.sources.base import Source, ends_with, one_piece, per_file
from piledriver.corpus.sources.shared.books import book_documents, compile_book_documents

SOURCE = Source(
    slug="epub",
    name="EPUB",
    title="EPUB books, one document each",
    raw_format="EPUB 2 and 3",
    licence="yours",
    consent="yours",
    treatment=(
        "The chapters in the order of the spine, one book a document: headings, paragraphs, lists, tables, verse "
        "and notes as a reader sees them; pictures, navigation, cover, imprint and colophon are left out, and so "
        "are the header and licence of Project Gutenberg. Books under digital rights management are refused. Title, "
        "author, language and rights come from the package; rights that name a licence become the licence of the "
        "document."
    ),
    wants=ends_with(".epub"),
    pieces=per_file(one_piece),
    compile=compile_book_documents,
    documents=book_documents,
)
