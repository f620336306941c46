"""Books3: the reader of the format only, for books that are in the public domain."""

from __future__ import annotations

from piledriver.corpus.sources.base import Source, ends_with, one_piece, per_file
from piledriver.corpus.sources.shared.books import book_documents, compile_book_documents

SOURCE = Source(
    slug="books3",
    name="Books3",
    title="books as EPUB; for public-domain input",
    raw_format="EPUB 2 and 3",
    licence="public-domain",
    consent="none",
    treatment=(
        "The original was a collection of books in copyright and is withdrawn; do not rebuild it. This is its "
        "reader, for books that are free: Standard Ebooks, Project Gutenberg. The chapters in the order of the "
        "spine, one book a document: headings, paragraphs, lists, tables, verse and notes as a reader sees them; "
        "pictures, navigation, cover, imprint and colophon are left out, and so are the header and licence of "
        "Project Gutenberg. Books under digital rights management are refused. Title, author, language and rights "
        "come from the package; rights that name a licence become the licence of the document. The original left "
        "html2text's Markdown with its escapes; here none is left."
    ),
    citation="Gao et al. 2020, The Pile, arXiv:2101.00027",
    wants=ends_with(".epub"),
    pieces=per_file(one_piece),
    compile=compile_book_documents,
    documents=book_documents,
)
