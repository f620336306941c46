"""EuroParl: proceedings of the European Parliament, with their tags for chapters and speakers."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.raw.streams import bare_name
from piledriver.corpus.sources.base import Found, Piece, Source, one_piece, per_file
from piledriver.corpus.text.language import language_of
from piledriver.corpus.text.normalise import decode_text

MIN_CHARACTERS = 200

_TAG = re.compile(r"<(/?)([A-Za-z]{1,12})\b([^<>]{0,400})>")
_NAME = re.compile(r"""NAME\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s>]+))""", re.IGNORECASE)
_FILE = re.compile(r"ep-(\d\d)-(\d\d)-(\d\d)[^/]*\.txt", re.IGNORECASE)
_LANGUAGE = re.compile(r"(?:^|[/!])([a-z]{2})/[^/]+$")


def _wants(name: str) -> bool:
    """Return whether it is `ep-00-01-17.txt` or a part of it; the tools in the same archive are not data."""
    return _FILE.fullmatch(bare_name(name)) is not None


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield one sitting."""
    raw = decode_text(piece.read(1 << 26))
    if len(raw) < MIN_CHARACTERS:
        yield Refusal("shorter than 200 characters", piece.origin, f"{len(raw)}")
        return
    text = without_tags(raw)
    if not text:
        yield Refusal("nothing but tags", piece.origin)
        return
    meta: dict[str, Any] = {"origin": piece.origin}
    if (language := _LANGUAGE.search(piece.origin)) is not None:
        meta["language"] = language.group(1)
    elif detected := language_of(text[:20_000]):
        meta["language"] = detected
    if (file := _FILE.search(piece.origin)) is not None:
        year = int(file.group(1))
        meta["date"] = f"{1900 + year if year > 90 else 2000 + year}-{file.group(2)}-{file.group(3)}"
    yield Document(text, meta=meta)


def without_tags(raw: str) -> str:
    """Return the text with a blank line before each chapter and speech, the speaker's name on a line of its own.

    >>> without_tags('<CHAPTER ID=1>\\nErika\\n<SPEAKER ID=2 NAME="Maes">\\nMr President,\\n<P>\\nI was present.')
    'Erika\\n\\nMaes\\nMr President,\\nI was present.'
    """
    raw = raw.replace("\r\n", "\n")
    lines: list[str] = []
    at = 0

    def add(text: str) -> None:
        for line in text.split("\n"):
            if line := " ".join(line.split()):
                lines.append(html.unescape(line) if "&" in line else line)

    for tag in _TAG.finditer(raw):
        add(raw[at : tag.start()])
        at = tag.end()
        kind = tag.group(2).upper()
        if kind in ("CHAPTER", "SPEAKER") and not tag.group(1):
            lines.append("")
        if kind == "SPEAKER" and (name := _NAME.search(tag.group(3))) is not None:
            add(name.group(1) or name.group(2) or name.group(3) or "")
    add(raw[at:])
    return re.sub("\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


SOURCE = Source(
    slug="europarl",
    name="EuroParl",
    title="proceedings of the European Parliament in 21 languages",
    raw_format="europarl.tgz (txt/<language>/ep-YY-MM-DD.txt with <CHAPTER>, <SPEAKER> and <P> tags)",
    licence="free use with attribution",
    consent="author",
    treatment=(
        "One file is one document. Tags are removed wherever they stand, also in the middle of a line, and a "
        "speaker's tag becomes the name; a blank line comes before each chapter and speech. Files of fewer than "
        "200 characters are refused, as in the original; tags that it did not know stopped it, here they are "
        "removed as well. The encoding is detected where it is not UTF-8. Language and date come from the path; "
        "outside a language's folder the language is detected from the text."
    ),
    citation="Koehn, Europarl: A Parallel Corpus for Statistical Machine Translation, MT Summit 2005",
    wants=_wants,
    pieces=per_file(one_piece),
    documents=_documents,
)
