"""A source: files of haikus, separated by empty lines, to one document for each haiku."""

from __future__ import annotations

from collections.abc import Iterator

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, one_piece, per_file


def documents(piece: Piece) -> Iterator[Found]:
    """Yield a document for each haiku, and a rejection with its reason for anything that does not have three lines."""
    for number, poem in enumerate(piece.read().decode("utf-8").split("\n\n")):
        lines = [line.strip() for line in poem.strip().splitlines()]
        if len(lines) == 3:
            yield Document("\n".join(lines), meta={"origin": f"{piece.origin}#{number}", "licence": "CC0-1.0"})
        elif lines:
            yield Refusal("not three lines", origin=f"{piece.origin}#{number}", detail=f"{len(lines)} lines")


SOURCE = Source(
    slug="haiku",
    name="Haiku",
    title="haikus, separated by empty lines",
    raw_format="UTF-8 text",
    licence="CC0-1.0",
    consent="given",
    treatment="One document for each haiku of three lines.",
    wants=ends_with(".txt"),
    pieces=per_file(one_piece),
    documents=documents,
)
