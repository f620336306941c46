"""DM Mathematics: question and answer files of DeepMind's mathematics_dataset."""

from __future__ import annotations

import re
from collections.abc import Iterator

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.raw.lines import bounded_lines
from piledriver.corpus.raw.partial_reads import peek_head
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, group_by_size, one_piece, per_file
from piledriver.corpus.text.normalise import NotTextError, is_binary

DOCUMENT_CHARACTERS = 8192
LICENCE = "Apache-2.0"

_PLACE = re.compile(r"(?:^|[/!])((?:train-(?:easy|medium|hard)|interpolate|extrapolate))/([a-z0-9_]+)\.txt")


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield consecutive questions and answers as documents, each cut after the answer that passes 8192 characters."""
    place = _PLACE.search(piece.origin)
    meta = {"licence": LICENCE} | ({"level": place.group(1), "module": place.group(2)} if place else {})
    number = 0
    for pairs in group_by_size(_pairs(piece), lambda pair: len(pair[0]) + len(pair[1]), DOCUMENT_CHARACTERS + 1):
        if isinstance(pairs, Refusal):
            yield pairs
            continue
        text = "\n".join(f"{question}\n{answer}" for question, answer in pairs)
        yield Document(text, meta={"origin": f"{piece.origin}#{number}", **meta})
        number += len(pairs)


def _pairs(piece: Piece) -> Iterator[tuple[str, str] | Refusal]:
    """Yield (question, answer) of a file. Skip blank lines, which an old version of the generator inserted."""
    question: str | None = None
    number = 0
    head, opened = peek_head(piece.open(), 8192)
    if is_binary(head):
        raise NotTextError("binary content")
    with opened:
        for line in bounded_lines(opened, piece.origin, 1 << 20):
            if isinstance(line, Refusal):
                yield line
                continue
            text = line.decode("utf-8", "replace").strip("\r\n")
            if not text.strip():
                continue
            if question is None:
                question = text
            else:
                yield question, text
                question = None
                number += 1
    if question is not None:
        yield Refusal("question without answer", f"{piece.origin}#{number}", question[:200])


SOURCE = Source(
    slug="dm-mathematics",
    name="DM Mathematics",
    title="questions and answers of school mathematics",
    raw_format="mathematics_dataset-v1.0.tar.gz, or the text files in it",
    licence=LICENCE,
    consent="author",
    treatment=(
        "Questions and answers are taken as they are, also from files in which an old version of the generator put "
        "a blank line between all others. A document is consecutive questions of one module, cut after an answer "
        "beyond 8192 characters. Level (train-easy, train-medium, train-hard, interpolate, extrapolate) and module "
        "come from the path."
    ),
    citation="Saxton et al., Analysing Mathematical Reasoning Abilities of Neural Models, ICLR 2019",
    wants=ends_with(".txt"),
    pieces=per_file(one_piece),
    documents=_documents,
)
