"""Render a parsed HTML tree as readable text: one walk, no recursion, the white space rules of a browser.

Headings are marked `#`, list items `-` or by number and indented when nested, quotations `>`, definitions `:`, the
cells of a data table `|`; code blocks stand verbatim in fences, other preformatted text verbatim without; mathematics
is LaTeX in dollars; super- and subscripts are Unicode where Unicode has them. Tables that only arrange a page are read
cell by cell. Links become their text, images nothing (except formulas). `writer.py` does the writing.
"""

from __future__ import annotations

import re
from typing import Any

from lxml import etree

from piledriver.corpus.formats.html.math import clean_tex, math_to_tex
from piledriver.corpus.formats.html.scripts import subscript, superscript
from piledriver.corpus.formats.html.tags import (
    BLOCK,
    GAPS,
    HEADINGS,
    INLINE,
    KINDS,
    PARAGRAPHS,
    SIMPLE,
    SKIP,
    SPECIAL,
    VERBATIM,
)
from piledriver.corpus.formats.html.whitespace import BREAK, collapsed, is_first_item, preformatted, text_content
from piledriver.corpus.formats.html.writer import TextWriter

_INSIDE_SKIPPED = SKIP + 1
_LISTS = ("ul", "ol", "menu", "dir")
_HIGHLIGHTER = re.compile(r"\b(?:highlight|codehilite|sourceCode|syntaxhighlighter|crayon|hljs|rouge)", re.IGNORECASE)
_is_layout_table = etree.XPath(
    "boolean(@role='presentation' or @role='none' or .//table or not(.//tr[count(td|th)>1])"
    " or .//td[count(p|div|ul|ol|dl|h1|h2|h3|h4|h5|h6|pre|blockquote|section|article)>1]"
    " or .//td//pre or .//td//h2 or .//td//h3 or .//td//blockquote or .//td//article"
    # Old pages set their columns in tables: half a page in a cell is not data.
    " or not(.//th) and .//td[string-length(.) > 600])"
)
_has_more_than_words = etree.XPath("boolean(.//math|.//script|.//img|.//br|.//p|.//div)")


def render(root: Any) -> str:
    """Return the text of an element and everything in it.

    Each element is visited once, in order. Ends are found by comparing parents, twice as fast as asking for end events;
    elements without children close at once.
    """
    writer = TextWriter()
    inline, kind_of, stand_apart = writer.inline, KINDS.get, writer.stand_apart
    opened: list[Any] = []
    kinds: list[int] = []
    for element in root.iter():
        parent = element.getparent()
        while opened and opened[-1] is not parent:
            if (kind := kinds.pop()) == INLINE:
                if tail := opened.pop().tail:
                    inline.append(tail)
            else:
                _close(writer, opened.pop(), kind)
        if kinds and kinds[-1] >= SKIP:
            opened.append(element)
            kinds.append(_INSIDE_SKIPPED)
            continue
        tag = element.tag
        kind = kind_of(tag, INLINE)
        if kind == SIMPLE:
            stand_apart(GAPS[tag])
        elif kind == BLOCK:
            _open_block(writer, element, tag)
        elif kind == SPECIAL and _special(writer, element, tag):
            kind = SKIP
        if kind < SKIP and (text := element.text):
            inline.append(text)
        if len(element) or not opened:
            opened.append(element)
            kinds.append(kind)
        elif kind == INLINE:
            if tail := element.tail:
                inline.append(tail)
        else:
            _close(writer, element, kind)
    while len(opened) > 1:
        _close(writer, opened.pop(), kinds.pop())
    if kinds and kinds[0] == BLOCK:
        _close_block(writer, root.tag)
    return writer.finished()


def _close(writer: TextWriter, element: Any, kind: int) -> None:
    if kind == INLINE:
        if tail := element.tail:
            writer.inline.append(tail)
    elif kind <= BLOCK:
        if kind == SIMPLE:
            writer.stand_apart(GAPS[element.tag])
        else:
            _close_block(writer, element.tag)
        # Most text nodes of a page are white space between blocks.
        if (tail := element.tail) and not tail.isspace():
            writer.inline.append(tail)
    else:
        if kind == SPECIAL:
            _close_special(writer, element.tag)
        if kind != _INSIDE_SKIPPED and (tail := element.tail):
            writer.inline.append(tail)


def _open_block(writer: TextWriter, element: Any, tag: str) -> None:
    if writer.in_table:
        if tag in ("td", "th"):
            writer.inline.clear()
        else:
            writer.inline.append(BREAK)
        return
    if writer.inline:
        writer.flush()
    if tag in HEADINGS:
        writer.open_heading(HEADINGS[tag])
    elif tag == "li":
        writer.open_item(element.get("value"), first=writer.gap == 2 and is_first_item(element))
    elif tag == "dd":
        writer.open_definition(inside_another=element.getparent().tag == "dd")
    elif tag in _LISTS:
        writer.open_list(element.get("start"), element.get("type"), numbered=tag == "ol")
    elif tag == "blockquote":
        writer.open_quotation()
    elif tag == "table":
        writer.open_table(layout=bool(_is_layout_table(element)))
    else:
        writer.need(2 if tag in PARAGRAPHS else 1)


def _close_block(writer: TextWriter, tag: str) -> None:
    if writer.in_table:
        _close_in_table(writer, tag)
        return
    if writer.inline:
        writer.flush()
    if tag in ("li", "dd"):
        writer.close_item()
    elif tag == "blockquote":
        writer.close_quotation()
    elif tag in _LISTS:
        writer.close_list()
    elif tag == "table":
        writer.close_table()
    elif tag in HEADINGS:
        writer.close_heading()
    else:
        writer.need(2 if tag in PARAGRAPHS else 1)


def _close_in_table(writer: TextWriter, tag: str) -> None:
    if tag in ("td", "th"):
        writer.close_cell()
    elif tag == "tr":
        writer.close_row()
    elif tag == "caption":
        writer.close_caption()
    elif tag == "table":
        writer.close_table()
    else:
        writer.inline.append(BREAK)


def _special(writer: TextWriter, element: Any, tag: str) -> bool:
    """Write a tag with rules of its own; return whether its content is to be skipped."""
    if tag == "br":
        writer.inline.append(BREAK)
    elif tag in VERBATIM:
        _verbatim(writer, element)
    elif tag == "math":
        writer.formula(math_to_tex(element), displayed=element.get("display") == "block")
    elif tag == "script":
        kind = element.get("type") or ""
        if kind.startswith("math/tex"):
            writer.formula(clean_tex(element.text or ""), displayed="display" in kind)
    elif tag == "img":
        name = element.get("class") or ""
        if name and ("latex" in name or "math" in name or name == "tex") and (alt := element.get("alt")):
            writer.formula(clean_tex(alt), displayed="display" in name or "block" in name)
    elif tag in ("sub", "sup"):
        return _script(writer, element, tag)
    elif tag == "hr":
        writer.rule()
    elif tag == "code":
        writer.open_code()
        return False
    else:
        writer.inline.append("“" if tag == "q" else "(")
        return False
    return True


def _close_special(writer: TextWriter, tag: str) -> None:
    if tag == "code":
        writer.close_code()
    elif tag == "q":
        writer.inline.append("”")
    elif tag == "rt":
        writer.inline.append(")")


def _script(writer: TextWriter, element: Any, tag: str) -> bool:
    if len(element) and _has_more_than_words(element):
        return False
    text = collapsed(text_content(element))
    linked = len(element) > 0 and element.find(".//a") is not None
    before = writer.inline[-1][-1:] if writer.inline else ""
    writer.inline.append(subscript(text, before) if tag == "sub" else superscript(text, before, linked))
    return True


def _verbatim(writer: TextWriter, element: Any) -> None:
    text = preformatted(element)
    classes = f"{element.get('class') or ''} {element[0].get('class') or '' if len(element) else ''}"
    code = any(child.tag == "code" for child in element)
    around = element
    for _ in range(2):
        # Highlighters put their name and the language on an element around it.
        around = around.getparent()
        if around is None:
            break
        if (found := around.get("class")) and _HIGHLIGHTER.search(found):
            code, classes = True, f"{classes} {found}"
    writer.verbatim(text, classes, code=code)
