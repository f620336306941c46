"""Remove Project Gutenberg's header and licence from a book, in all their historic forms.

Since 1971 they were written in a dozen ways: a line of asterisks with START OF (THE or THIS) PROJECT GUTENBERG EBOOK
(or ETEXT), before that a small print whose end is marked, and before that only a known first line. Paragraphs in which
the producers of the file name themselves are removed as well.
"""

from __future__ import annotations

import re
from typing import Any


def _pattern(*alternatives: str, before: str = "", after: str = "") -> re.Pattern[str]:
    """Return a case-insensitive pattern of alternatives in which a space matches any run of spaces and tabs."""
    body = re.sub(r" (?!\\t)", lambda _: r"[ \t]+", "|".join(alternatives))
    return re.compile(f"{before}(?:{body}){after}", re.IGNORECASE | re.MULTILINE)


_START = _pattern(
    r"(?:START|BEGIN(?:NING)?) OF (?:(?:THE|THIS|DIESES?) )?PROJE[CK]T GUTENBERG",
    # In an EPUB the mark may be a heading.
    before=r"^(?:#{1,6})?[ \t]*\*{2,3}[ \t]*",
    # A long title continues in the next line, which then ends in the asterisks.
    after=r"[^\n]*\n(?:(?![ \t]*\n)[^\n]*\*\*\*[ \t]*\n)?",
)
_SMALL_PRINT_END = re.compile(
    r"^[^\n]{0,20}\*[ \t]?END[ \t*]{1,4}(?:OF[ \t]+)?THE[ \t]+SMALL[ \t]+PRINT[^\n]*\n(?:[^\n]{0,60}\*END\*[^\n]*\n)?",
    re.IGNORECASE | re.MULTILINE,
)
_END = _pattern(
    r"\*{2,3}[ \t]*END OF (?:(?:THE|THIS) )?PROJE[CK]T GUTENBERG",
    r"(?:\*+[ \t]*)?(?:The )?End of (?:(?:the|this) )?(?:Project )?Gutenberg(?:['’]s|\b)",
    r"Ende d(?:ieses|es) Proje[ck]t Gutenberg",
    r"Fin de (?:ce )?Project Gutenberg",
    r"\*{3}[ \t]*START:[ \t]*FULL LICENSE",
    before=r"^(?:#{1,6})?[ \t]*",
    after=r"[^\n]*",
)
# The headers of old files hold these too: only in the second half of a file do they end the book.
_LATE_END = _pattern(
    r"\*{2,}[ \t]*START[ \t*]+THE SMALL PRINT",
    r"\**[ \t]*This file should be named \S+\.(?:txt|zip)\b",
    before=r"^[ \t]*",
)
_FIRST_LINE = _pattern(r"(?:\**This is )?(?:(?:The|A) )?Project Gutenberg", before=r"\A\W{0,20}")
_MAKING = (
    "produced|prepared|transcribed|scanned|typed|entered|created|digiti[sz]ed|proof(?:ed|read)|contributed|provided"
    "|converted|keyed"
)
_CREDITS = _pattern(
    rf"(?:this )?(?:e-?text|e-?book|file|edition|html version|document) (?:was |is )?(?:{_MAKING})\b",
    rf"(?:{_MAKING})\b[^\n]{{0,60}}?\b(?:by|from|for|in)\b",
    r"e-?text (?:prepared|produced|scanned|by)",
    r"html version by",
    r"credits?:",
    r"(?:and the )?(?:online )?distributed proofread\w*",
    r"(?:updated|revised) editions? will replace",
    r"\(?this file was produced from images",
    r"note: (?:project gutenberg|images of)",
    r"project gutenberg (?:also|volunteers)",
    r"character set encoding:",
    r"\[?(?:last|most recently) updated",
)
_MOST_CREDITS = 8
_HEADER_CHARACTERS = 60_000
_FIELD = re.compile(
    r"^(Title|Author|Translator|Release Date|Posting Date|Language)[ \t]*:[ \t]*(\S[^\n]*(?:\n[ \t]{4,}\S[^\n]*)*)",
    re.MULTILINE,
)
_NUMBER = re.compile(r"\[?E-?(?:text|book)[ \t]*#?[ \t]*(\d{1,6})\]?", re.IGNORECASE)
_COPYRIGHTED = _pattern(r"This is a COPYRIGHTED Project Gutenberg", r"Copyright Status:[ \t]*Copyrighted")
_ILLUSTRATION = re.compile(r"^[ \t]*\[Illustration\][ \t]*$", re.MULTILINE | re.IGNORECASE)


def without_boilerplate(text: str) -> str:
    """Return the book alone; a text without Project Gutenberg's marks is returned unchanged.

    >>> book = "*** START OF THIS PROJECT GUTENBERG EBOOK X ***\\n\\nProduced by A\\n\\nCall me."
    >>> without_boilerplate(book + "\\n\\nEnd of Project Gutenberg's X\\n\\nthe licence")
    'Call me.'
    """
    if b"gutenberg" not in text.encode("utf-8", "replace").lower():
        # Header and licence both hold the word; a search for a word in bytes is much faster than a pattern.
        return text
    start = _start(text)
    end = _end(text, start)
    if start == 0 and end == len(text):
        return text
    return _ILLUSTRATION.sub("", _without_credits(text[start:end])).strip()


def book_meta(text: str) -> dict[str, Any]:
    """Return title, author, language, date, number and rights from the header."""
    header = text[: min(_start(text), _HEADER_CHARACTERS)]
    if not header:
        return {}
    found = {name: " ".join(value.split()) for name, value in _FIELD.findall(header)}
    number = _NUMBER.search(header)
    date = found.get("Release Date") or found.get("Posting Date")
    licence = "copyrighted" if _COPYRIGHTED.search(header) else "public-domain"
    meta = {
        "title": found.get("Title"),
        "author": found.get("Author"),
        "translator": found.get("Translator"),
        "language": found.get("Language"),
        "release_date": date.partition("[")[0].strip() if date else None,
        "gutenberg_id": int(number[1]) if number else None,
        "licence": licence,
    }
    return {name: value for name, value in meta.items() if value}


def declared_encoding(content: bytes) -> str | None:
    """Return the character set that the header names, or `None`."""
    found = re.search(rb"Character set encoding:[ \t]*([\w.:-]{2,40})", content[:_HEADER_CHARACTERS], re.IGNORECASE)
    return found[1].decode("ascii") if found else None


def _start(text: str) -> int:
    # A start mark far inside a book is a quotation, or the header of a second one bound with it.
    limit = min(len(text), max(_HEADER_CHARACTERS, len(text) // 2))
    marked = _START.search(text, 0, limit)
    small_print = _SMALL_PRINT_END.search(text, 0, limit)
    # Some files of 2003 and 2004 have the mark first and the small print after it.
    ends = [found.end() for found in (marked, small_print) if found is not None]
    if ends:
        return max(ends) if max(ends) - min(ends) < 30_000 else min(ends)
    if not _FIRST_LINE.match(text):
        return 0
    # Without a mark, the header of one of the first etexts is its first paragraph.
    blank = re.search(r"\n[ \t]*\n", text)
    return blank.end() if blank else 0


def _end(text: str, start: int) -> int:
    # The licence of a poem is several times as long as the poem, so the mark may be anywhere.
    marks = (_END.search(text, start), _LATE_END.search(text, (start + len(text)) // 2))
    return min((found.start() for found in marks if found), default=len(text))


def _without_credits(text: str) -> str:
    """Return the text without the paragraphs at either end in which the producers of the file name themselves."""
    paragraphs = re.split(r"\n[ \t]*\n", text)
    written = [index for index, paragraph in enumerate(paragraphs) if paragraph.strip()]
    for index in {*written[:_MOST_CREDITS], *written[-3:]}:
        first = paragraphs[index].strip().lstrip("[(*_ ")
        if first and len(first) < 1500 and _CREDITS.match(first):
            paragraphs[index] = ""
    # Runs of empty paragraphs, the wide gaps of a title page, become one.
    kept = [p for index, p in enumerate(paragraphs) if p.strip() or (index and paragraphs[index - 1].strip())]
    return "\n\n".join(kept)
