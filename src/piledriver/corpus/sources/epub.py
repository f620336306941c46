"""EPUB books: one file, one document."""

from __future__ import annotations

from piledriver.corpus.epub import book_documents
from piledriver.corpus.html_plain import compiled
from piledriver.corpus.source import Source, each, ends_with, whole

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
    pieces=each(whole),
    prepare=compiled,
    documents=book_documents,
)
