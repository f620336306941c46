"""Books3: the reader of the format only, for books that are in the public domain."""

from piledriver.corpus.sources.shared.books import book_source

SOURCE = book_source(
    slug="books3",
    name="Books3",
    title="books as EPUB; for public-domain input",
    licence="public-domain",
    consent="none",
    before=(
        "The original was a collection of books in copyright and is withdrawn; do not rebuild it. This is its reader, "
        "for books that are free: Standard Ebooks, Project Gutenberg."
    ),
    after="The original left html2text's Markdown with its escapes; here none is left.",
    citation="Gao et al. 2020, The Pile, arXiv:2101.00027",
)
