"""EPUB books: one file, one document."""

from piledriver.corpus.sources.shared.books import book_source

SOURCE = book_source(slug="epub", name="EPUB", title="EPUB books, one document each", licence="yours", consent="yours")
