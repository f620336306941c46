"""White space, line breaks, preformatted text and list numbers of HTML as text."""

from __future__ import annotations

from typing import Any

from lxml import etree

# The mark of `br` until a paragraph is written; control characters are removed before parsing.
BREAK = "\x01"
_IN_PRE_BLOCKS = ("div", "p", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6")
_ROMAN = (("m", 1000), ("cm", 900), ("d", 500), ("cd", 400), ("c", 100), ("xc", 90), ("l", 50), ("xl", 40), ("x", 10))
_ROMAN_SMALL = (("ix", 9), ("v", 5), ("iv", 4), ("i", 1))


def collapsed(text: str) -> str:
    """Return the text with runs of white space as one space, as a browser shows it; wide spaces inside it stay."""
    # Searching for each character is faster than a pattern.
    for space in "\n\t\r\x0c\xa0":
        if space in text:
            text = text.replace(space, " ")
    while "  " in text:
        text = text.replace("  ", " ")
    return text.strip()


def broken(text: str) -> list[str]:
    """Split a paragraph at `br` into lines; two of them leave a blank one."""
    lines: list[str] = []
    for part in text.split(BREAK):
        line = collapsed(part)
        if line or (lines and lines[-1]):
            lines.append(line)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def is_first_item(item: Any) -> bool:
    """Return whether an item is the first of its list."""
    before = item.getprevious()
    while before is not None and before.tag != "li":
        before = before.getprevious()
    return before is None


def preformatted(element: Any) -> str:
    """Return the text of a preformatted element verbatim, with the line breaks of elements in it."""
    if len(element) and not (len(element) == 1 and element[0].tag == "code" and not len(element[0])):
        for line_break in element.iter("br"):
            line_break.tail = "\n" + (line_break.tail or "")
        for block in element.iter(*_IN_PRE_BLOCKS):
            tail = block.tail or ""
            if not tail.startswith("\n") and not (not len(block) and (block.text or "").endswith("\n")):
                block.tail = "\n" + tail
    text = text_content(element).replace("\r\n", "\n").replace("\r", "\n").replace("\xa0", " ")
    return text.strip("\n").rstrip()


def text_content(element: Any) -> str:
    """Return all text inside an element, in document order."""
    return str(etree.tostring(element, method="text", encoding="unicode", with_tail=False))


def parse_integer(value: str | None, default: int) -> int:
    """Return the number that an attribute holds, or the default."""
    try:
        return int(value) if value and len(value) < 9 else default
    except ValueError:
        return default


def numeral(number: int, style: str) -> str:
    """Return the number of a list item in the style of its list.

    >>> numeral(4, "1"), numeral(28, "a"), numeral(14, "I")
    ('4', 'ab', 'XIV')
    """
    if style in ("a", "A") and number > 0:
        letters = ""
        while number > 0:
            number, digit = divmod(number - 1, 26)
            letters = chr(ord(style) + digit) + letters
        return letters
    if style in ("i", "I") and 0 < number < 4000:
        roman = ""
        for letters, value in _ROMAN + _ROMAN_SMALL:
            count, number = divmod(number, value)
            roman += letters * count
        return roman.upper() if style == "I" else roman
    return str(number)
