"""The Pile's filter for the text of scanned and typeset papers: drop paragraphs that are noise."""

from __future__ import annotations

import re
import unicodedata

MIN_MEAN_WORD = 2
MAX_CID_SHARE = 0.10
MIN_LETTER_SHARE = 0.40
MAX_NOTICE = 150

_CID = re.compile(r"\(cid:\d{1,6}\)")
_HYPHENATED = re.compile(r"(?<=[^\W\d_])-\n\s*(?=[a-z])")
_NOTICE = re.compile(
    r"©|(?:\(c\)|copyright\W{1,5}(?:\(c\)\s*)?(?:by\s+)?|r)\s*[1-3]\d{3}|.*\ball rights reserved\b", re.IGNORECASE
)
_PAGE_NUMBER = re.compile(r"\W{0,3}(?:page\s*)?\d{1,4}\W{0,3}", re.IGNORECASE)
_QUOTES = str.maketrans({"`": "'", "´": "'", "‛": "’", "‟": "“", "″": '"', "′": "'"})
_LOOSE_ACCENTS = re.compile("(?<![^\\W\\d_])[\u0300-\u036f]+|[\u02c6\u02d8-\u02dd\u00a8\u00af\u00b8](?=\\s|[^\\W\\d_])")
_COMBINING = {"´": "\u0301", "¨": "\u0308", "ˆ": "\u0302", "˜": "\u0303", "ˇ": "\u030c"}
_SET_APART = re.compile("([^\\W\\d_]?)([´¨ˆ˜ˇ])([^\\W\\d_]?)")
_PRESENTATION = re.compile("[\ufb00-\ufb4f\uff01-\uff5e\u2000-\u200a\u3000]")


def filtered(text: str) -> str:
    """Return the paragraphs that are prose, cleaned, with a blank line between them.

    >>> filtered("A fine para-\\ngraph of words.\\n\\n© 1999 The Press\\n\\n17\\n\\n(cid:1)(cid:2)(cid:3) x")
    'A fine paragraph of words.'
    """
    text = _HYPHENATED.sub("", text)
    kept = (_paragraph(paragraph) for paragraph in re.split(r"\n[ \t]*\n", text))
    return "\n\n".join(paragraph for paragraph in kept if paragraph)


def _paragraph(paragraph: str) -> str:
    paragraph = " ".join(paragraph.split())
    if not paragraph or _PAGE_NUMBER.fullmatch(paragraph):
        return ""
    if len(paragraph) < MAX_NOTICE and _NOTICE.match(paragraph):
        return ""
    words = paragraph.split(" ")
    marks = len(_CID.findall(paragraph))
    if marks:
        # A mark is about eight characters long.
        if 8 * marks > MAX_CID_SHARE * len(paragraph):
            return ""
        paragraph = " ".join(_CID.sub("", paragraph).split())
        words = paragraph.split(" ")
    if sum(map(len, words)) / max(1, len(words)) < MIN_MEAN_WORD:
        return ""
    if sum(map(str.isalpha, paragraph)) < MIN_LETTER_SHARE * len(paragraph):
        return ""
    return _characters(paragraph)


def _characters(text: str) -> str:
    if text.isascii():
        return text.translate(_QUOTES)
    # Only compatibility forms of typesetting (ligatures, full width) are replaced: "²" is not 2.
    text = _PRESENTATION.sub(lambda found: unicodedata.normalize("NFKC", found[0]), text)
    text = _SET_APART.sub(_composed, text)
    text = unicodedata.normalize("NFC", text.translate(_QUOTES))
    return _LOOSE_ACCENTS.sub("", text)


def _composed(found: re.Match[str]) -> str:
    """Compose `G¨odel` and `Go¨ del` to Gödel: TeX prints an accent as a separate sign before or after the letter."""
    before, accent, after = found.groups()
    mark = _COMBINING[accent]
    for letter, rest in ((after, before), (before, after)):
        whole = unicodedata.normalize("NFC", letter + mark) if letter else ""
        if len(whole) == 1:
            return rest + whole if letter == after else whole + rest
    return found[0]
