"""Gutenberg (PG-19): books of Project Gutenberg as plain text."""

from __future__ import annotations

import os
from collections.abc import Iterator

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.gutenberg import book_meta, declared_encoding, without_boilerplate
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, one_piece, per_file
from piledriver.corpus.text.normalise import decode_text


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield the book without Project Gutenberg's header and licence."""
    content = piece.read()
    text = decode_text(content, declared_encoding(content)).replace("\r\n", "\n").replace("\r", "\n")
    meta = {"origin": piece.origin, **book_meta(text)}
    if "gutenberg_id" not in meta:
        number = (
            os.path.basename(piece.origin.rpartition("!")[2]).partition(".")[0].removeprefix("pg").partition("-")[0]
        )
        if number.isdecimal() and len(number) < 7:
            meta["gutenberg_id"] = int(number)
    book = without_boilerplate(text)
    if not book.strip():
        yield Refusal("no text", piece.origin, "nothing but header and licence")
        return
    if meta.get("licence") == "copyrighted":
        yield Refusal("copyrighted", piece.origin, "Project Gutenberg distributes it with its holder's permission only")
        return
    yield Document(book, meta=meta)


SOURCE = Source(
    slug="gutenberg-pg-19",
    name="Gutenberg (PG-19)",
    title="books of Project Gutenberg, as in PG-19",
    raw_format="PG-19's text files, or Project Gutenberg's own (.txt, also zipped) of any year",
    licence="public-domain",
    consent="terms",
    treatment=(
        "One book, one document. Header, small print, licence and the paragraphs in which producers and "
        "transcribers name themselves are removed in all the forms that Project Gutenberg has used; PG-19's files, "
        "which have none, are kept as they are. Title, author, language, number and date come from the header. A "
        "book that the header calls copyrighted is refused. Public domain in the United States; elsewhere terms "
        "differ. PG-19's replacement of offensive words is not repeated."
    ),
    citation="Rae et al. 2019, Compressive Transformers, arXiv:1911.05507; Project Gutenberg, gutenberg.org",
    # Project Gutenberg serves books as `2701.txt.utf-8`.
    wants=ends_with(".txt", ".txt.utf-8", ".txt.utf8"),
    pieces=per_file(one_piece),
    documents=_documents,
)
