"""Markdown files: one file, one document."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from datetime import date
from typing import Any

import yaml

from piledriver.corpus.document import Document
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, one_piece, per_file
from piledriver.corpus.text.creative_commons import licence_id
from piledriver.corpus.text.normalise import decode_text

_MOST_FRONT_MATTER = 1 << 16
_KEPT = ("title", "author", "date", "language", "lang", "license", "licence")
_FENCE = re.compile(r"^ {0,3}(```+|~~~+)", re.MULTILINE)


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield the text without front matter and comments."""
    meta, text = _front_matter(decode_text(piece.read()).replace("\r\n", "\n"))
    yield Document(_without_comments(text), meta={"origin": piece.origin, **meta})


def _front_matter(text: str) -> tuple[dict[str, Any], str]:
    """Return (meta, text): front matter is YAML between lines of dashes or TOML between plus signs, at the start."""
    mark = text[:3]
    if mark not in ("---", "+++") or text[3:4] != "\n":
        return {}, text
    end = text.find(f"\n{mark}", 3, _MOST_FRONT_MATTER)
    if end < 0 or text[end + 4 : end + 5] not in ("", "\n", " "):
        return {}, text
    try:
        fields = tomllib.loads(text[4:end]) if mark == "+++" else yaml.load(text[4:end], Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}, text
    if not isinstance(fields, dict):
        return {}, text
    said = {name: value.isoformat() if isinstance(value, date) else value for name, value in fields.items()}
    meta = {name: said[name][:1000] for name in _KEPT if isinstance(said.get(name), str) and said[name]}
    licence = meta.pop("license", None) or meta.pop("licence", None)
    if licence:
        meta["licence"] = licence_id(licence) or licence
    return meta, text[end + 4 :].partition("\n")[2]


def _without_comments(text: str) -> str:
    """Return the text without HTML comments; inside a code fence they are code and stay."""
    if "<!--" not in text:
        return text
    parts: list[str] = []
    fence, start = "", 0
    for found in _FENCE.finditer(text):
        if not fence:
            parts.append(_cut(text[start : found.start()]))
            fence, start = found[1], found.start()
        elif found[1].startswith(fence):
            parts.append(text[start : found.end()])
            fence, start = "", found.end()
    parts.append(text[start:] if fence else _cut(text[start:]))
    return "".join(parts)


def _cut(text: str) -> str:
    parts: list[str] = []
    at = 0
    while (start := text.find("<!--", at)) >= 0:
        end = text.find("-->", start + 4)
        if end < 0:
            break
        parts.append(text[at:start])
        at = end + 3
    parts.append(text[at:])
    return "".join(parts)


SOURCE = Source(
    slug="markdown",
    name="Markdown",
    title="Markdown files, one document each",
    raw_format="Markdown in any encoding, alone, compressed or in archives",
    licence="yours",
    consent="yours",
    treatment=(
        "Markdown is readable as it stands and is kept as it was written. YAML or TOML front matter becomes meta "
        "(title, author, date, language, licence); comments outside code go."
    ),
    wants=ends_with(".md", ".markdown", ".mdown", ".mkd", ".mdx", ".rmd", ".qmd"),
    pieces=per_file(one_piece),
    documents=_documents,
)
