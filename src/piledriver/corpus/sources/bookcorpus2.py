"""BookCorpus2: the reader of the format only, for books whose authors allow it."""

from __future__ import annotations

from piledriver.corpus.sources.base import Source, ends_with, one_piece, per_file
from piledriver.corpus.sources.shared.books import book_documents, compile_book_documents

SOURCE = Source(
    slug="bookcorpus2",
    name="BookCorpus2",
    title="self-published books as EPUB; for public-domain or freely licensed input",
    raw_format="EPUB 2 and 3",
    licence="unknown",
    consent="none",
    treatment=(
        "The original took books from Smashwords without asking their authors; use it for books in the public "
        "domain or under a free licence. The chapters in the order of the spine, one book a document: headings, "
        "paragraphs, lists, tables, verse and notes as a reader sees them; pictures, navigation, cover, imprint and "
        "colophon are left out, and so are the header and licence of Project Gutenberg. Books under digital rights "
        "management are refused. Title, author, language and rights come from the package; rights that name a "
        "licence become the licence of the document."
    ),
    citation="Gao et al. 2020, The Pile, arXiv:2101.00027; Zhu et al. 2015, BookCorpus, arXiv:1506.06724",
    wants=ends_with(".epub"),
    pieces=per_file(one_piece),
    compile=compile_book_documents,
    documents=book_documents,
)
