"""BookCorpus2: the reader of the format only, for books whose authors allow it."""

from piledriver.corpus.sources.shared.books import book_source

SOURCE = book_source(
    slug="bookcorpus2",
    name="BookCorpus2",
    title="self-published books as EPUB; for public-domain or freely licensed input",
    licence="unknown",
    consent="none",
    before=(
        "The original took books from Smashwords without asking their authors; use it for books in the public domain "
        "or under a free licence."
    ),
    citation="Gao et al. 2020, The Pile, arXiv:2101.00027; Zhu et al. 2015, BookCorpus, arXiv:1506.06724",
)
