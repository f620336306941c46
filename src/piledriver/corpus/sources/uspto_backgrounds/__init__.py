"""USPTO Backgrounds: the background sections of US patents, from the office's weekly bulk files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.xml.parse import XmlError
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, per_file
from piledriver.corpus.sources.shared.record_pieces import record_pieces
from piledriver.corpus.sources.uspto_backgrounds.patents import Patent, background, from_aps, from_xml

# Where a document begins in a weekly file, always at the start of a line.
_START = re.compile(rb"(?m)^(?=<\?xml |PATN[ \t]*\r?$|<!DOCTYPE PATDOC|<PATDOC)")


def _last_start(buffer: bytes) -> int:
    """Return where the last document of the buffer begins; all before it are whole."""
    return max(0, max(buffer.rfind(mark) for mark in (b"\n<?xml ", b"\nPATN\n", b"\nPATN\r", b"\nPATN ")) + 1)


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield each patent of the piece."""
    content = piece.read()
    if content.startswith(b"HHHHHT") and b"PATN" not in content:
        # The label of the tape, alone in front of the first document.
        return
    starts = [found.start() for found in _START.finditer(content)] or [0]
    if content[: starts[0]].strip() and not content.startswith(b"PATN", starts[0]):
        # The label of the tape precedes the first PATN.
        starts.insert(0, 0)
    # The DOCTYPE and the root after an XML declaration begin no other document: no tag closes in between.
    joined = [starts[0]]
    for start in starts[1:]:
        if content.startswith((b"<?xml", b"PATN"), start) or content.find(b"</", joined[-1], start) >= 0:
            joined.append(start)
    for start, end in zip(joined, [*joined[1:], len(content)], strict=True):
        if record := content[start:end].strip():
            yield _one(record, f"{piece.origin}#{piece.offset + start}")


def _one(record: bytes, origin: str) -> Found:
    try:
        if record.startswith(b"PATN"):
            patent: Patent | None = from_aps(record.decode("latin-1").replace("\r\n", "\n"))
        else:
            patent = from_xml(record)
    except XmlError as error:
        return Refusal("invalid xml" if record.startswith(b"<") else "not a patent", origin, str(error))
    if patent is None:
        return Refusal("not a patent", origin)
    if patent.number:
        origin = f"{origin.rpartition('#')[0]}#US{patent.number}"
    if patent.summary is not None:
        paragraphs = [line.text for line in patent.summary]
    else:
        paragraphs = background(patent.description)
    text = "\n".join(paragraphs)
    if not text.strip():
        return Refusal("no background", origin)
    meta = {"origin": origin, "licence": "public-domain", "patent": f"US{patent.number}", **patent.meta}
    meta["url"] = f"https://patents.google.com/patent/US{patent.number}"
    return Document(text, meta={name: value for name, value in meta.items() if value})


SOURCE = Source(
    slug="uspto-backgrounds",
    name="USPTO Backgrounds",
    title="background sections of US patents",
    raw_format="weekly bulk files, zipped or not: APS text (1976-2001), XML 2.5 (2002-2004), XML 4 (2005 on)",
    licence="public-domain",
    consent="author",
    treatment=(
        "A patent is a document. APS: the paragraphs of the brief summary under the first heading with BACKGROUND. "
        "XML 2.5: the whole brief summary with its headings, as in the original. XML 4 (and applications): the part of "
        "the description under the first heading with BACKGROUND. Paragraphs are joined by one newline; APS's named "
        "characters and scripts become Unicode, formulas LaTeX, tables pipe tables. Unlike the original, a background "
        "whose parts carry headings of their own (1. Field of the Invention, Description of Related Art) is taken "
        "whole and not cut at the first of them. Refused: no background, invalid XML."
    ),
    wants=ends_with(".xml", ".sgm", ".sgml", ".txt", ".greenbook", ".aps"),
    pieces=per_file(partial(record_pieces, last_cut=_last_start)),
    documents=_documents,
    citation="https://bulkdata.uspto.gov/",
)
