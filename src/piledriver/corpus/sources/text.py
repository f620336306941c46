"""Plain text files: one file, one document."""

from __future__ import annotations

from collections.abc import Iterator

from piledriver.corpus.document import Document
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, one_piece, per_file
from piledriver.corpus.text.normalise import decode_text


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield the whole file, decoded."""
    yield Document(decode_text(piece.read()), meta={"origin": piece.origin})


SOURCE = Source(
    slug="text",
    name="Text",
    title="plain text files, one document each",
    raw_format="text in any encoding, alone, compressed or in archives",
    licence="yours",
    consent="yours",
    treatment="The encoding is detected; the file is one document.",
    wants=ends_with(".txt", ".text", ".rst", ".log"),
    pieces=per_file(one_piece),
    documents=_documents,
)
