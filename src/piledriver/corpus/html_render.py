"""A parsed HTML tree as readable text: one walk, no recursion, the white space rules of a browser.

Headings are marked `#`, list items `-` or by number and indented when nested, quotations `>`, definitions `:`, the
cells of a data table `|`; code blocks stand verbatim in fences, other preformatted text verbatim without; mathematics
is LaTeX in dollars; super- and subscripts are Unicode where Unicode has them. Tables that only lay out a page are read
cell by cell. Links are their text, images nothing (but formulas).
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

from lxml import etree

from piledriver.corpus.html_lines import BREAK, broken, collapsed, integer, is_first_item, numeral, preformatted
from piledriver.corpus.html_math import clean_tex, math_to_tex
from piledriver.corpus.html_scripts import subscript, superscript, words
from piledriver.corpus.markdown import pipe_table

_MOST_PREFIXES = 12

# What a tag does to the text around it. Tags that are not named here are inline.
_SKIPPED = words(
    "head style template iframe object embed applet canvas audio video svg select datalist button textarea noscript"
    " noframes frameset map progress meter input rp"
)
_PARAGRAPHS = words("p blockquote figure ul ol dl menu dir table fieldset hgroup")
_LINES = words(
    "html body div section article main header footer nav aside address center form details summary figcaption"
    " caption tbody thead tfoot tr td th li dt dd legend search dialog option optgroup title marquee"
)
_HEADINGS = {f"h{level}": level for level in range(1, 7)}
_VERBATIM = frozenset({"pre", "listing", "xmp", "plaintext"})
_INLINE, _SIMPLE, _BLOCK, _SPECIAL, _SKIP, _INSIDE_SKIPPED = range(6)
# Blocks that do nothing but stand apart, and by how many line breaks.
_OWN_RULES = words("ul ol menu dir blockquote table li dd td th tr caption") | _HEADINGS.keys()
_GAPS = {tag: 2 if tag in _PARAGRAPHS else 1 for tag in (_PARAGRAPHS | _LINES) - _OWN_RULES}
_KINDS = (
    dict.fromkeys(_SKIPPED, _SKIP)
    | dict.fromkeys(_GAPS, _SIMPLE)
    | dict.fromkeys(_OWN_RULES, _BLOCK)
    | dict.fromkeys(_VERBATIM | words("script math br hr img code sub sup q rt"), _SPECIAL)
)
_CODE_CLASS = re.compile(r"code|prettyprint|highlight|brush|lang|syntax|source|crayon|hljs", re.IGNORECASE)
_HIGHLIGHTER = re.compile(r"\b(?:highlight|codehilite|sourceCode|syntaxhighlighter|crayon|hljs|rouge)", re.IGNORECASE)
_LANGUAGE_CLASS = re.compile(
    r"(?:^|[\s:])(?:lang(?:uage)?|highlight(?:-source|-text)?|brush)[-:]\s*([\w+#.-]{1,20})", re.IGNORECASE
)
_NO_LANGUAGE = words("default none source text plain plaintext notranslate code auto")
# The link to a heading that generators of pages put behind it.
_PERMALINK = re.compile(r"(?:\s*[¶🔗]|\s+[#§])$")
_is_layout_table = etree.XPath(
    "boolean(@role='presentation' or @role='none' or .//table or not(.//tr[count(td|th)>1])"
    " or .//td[count(p|div|ul|ol|dl|h1|h2|h3|h4|h5|h6|pre|blockquote|section|article)>1]"
    " or .//td//pre or .//td//h2 or .//td//h3 or .//td//blockquote or .//td//article)"
)


def render(root: Any) -> str:
    """The text of an element and all that stands in it."""
    return _Text().walk(root)


class _Text:
    """The text so far, the paragraph that is being filled, and the marks that stand before the next line."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.inline: list[str] = []
        self.heading = ""
        self.gap = 0
        self.prefixes: list[str] = []
        # Places in `prefixes` of list marks that no line has carried yet.
        self.marks: list[int] = []
        self.quotes_before = 0
        self.counters: list[int | None] = []
        self.numerals: list[str] = []
        # Data tables are not nested (one that holds another is layout), so one row at a time is enough.
        self.in_table = False
        self.layout: list[bool] = []
        self.rows: list[list[str]] = []
        self.cells: list[str] = []

    def walk(self, root: Any) -> str:
        """Every element once, in order. Ends are found by looking at parents, which is twice as fast as asking for
        end events; elements without children, most of all, never wait for theirs.
        """
        inline, kind_of, stand_apart = self.inline, _KINDS.get, self.stand_apart
        opened: list[Any] = []
        kinds: list[int] = []
        for element in root.iter():
            parent = element.getparent()
            while opened and opened[-1] is not parent:
                self.close(opened.pop(), kinds.pop())
            if kinds and kinds[-1] >= _SKIP:
                opened.append(element)
                kinds.append(_INSIDE_SKIPPED)
                continue
            tag = element.tag
            kind = kind_of(tag, _INLINE)
            if kind == _SIMPLE:
                stand_apart(tag)
            elif kind == _BLOCK:
                self.open_block(element, tag)
            elif kind == _SPECIAL and self.special(element, tag):
                kind = _SKIP
            if kind < _SKIP and (text := element.text):
                inline.append(text)
            if len(element) or not opened:
                opened.append(element)
                kinds.append(kind)
            elif kind == _INLINE:
                if tail := element.tail:
                    inline.append(tail)
            else:
                self.close(element, kind)
        while len(opened) > 1:
            self.close(opened.pop(), kinds.pop())
        if kinds and kinds[0] == _BLOCK:
            self.close_block(root.tag)
        self.flush()
        return "\n".join(self.lines)

    def close(self, element: Any, kind: int) -> None:
        if kind == _INLINE:
            if tail := element.tail:
                self.inline.append(tail)
        elif kind <= _BLOCK:
            if kind == _SIMPLE:
                self.stand_apart(element.tag)
            else:
                self.close_block(element.tag)
            # White space between blocks is most of the text of a page.
            if (tail := element.tail) and not tail.isspace():
                self.inline.append(tail)
        else:
            if kind == _SPECIAL:
                self.close_special(element)
            if kind != _INSIDE_SKIPPED and (tail := element.tail):
                self.inline.append(tail)

    def stand_apart(self, tag: str) -> None:
        """What comes next is not in the same paragraph as what came before."""
        inline = self.inline
        if self.in_table:
            inline.append(BREAK)
            return
        gap = _GAPS[tag]
        if inline:
            if len(inline) == 1 and not self.prefixes and not self.heading and BREAK not in inline[0]:
                # Plain paragraphs are most of all text: what `flush` and `emit` would do, without them.
                text = collapsed(inline.pop())
                if text:
                    if self.gap > 1 and self.lines:
                        self.lines.append("")
                    self.lines.append(text)
                    self.gap = gap
                    self.quotes_before = 0
                    return
            else:
                self.flush()
        if gap > self.gap and not self.marks:
            self.gap = gap

    def open_block(self, element: Any, tag: str) -> None:
        if self.in_table:
            if tag in ("td", "th"):
                self.inline.clear()
            else:
                self.inline.append(BREAK)
            return
        if self.inline:
            self.flush()
        if tag in _HEADINGS:
            self.need(2)
            self.heading = "#" * _HEADINGS[tag] + " "
        elif tag == "li":
            self.open_item(element)
        elif tag == "dd":
            self.need(1)
            if self.prefixes and element.getparent().tag == "dd":
                # An end tag was left out: it is the next definition, not one inside the first.
                self.prefixes[-1] = ": "
                self.marks.append(len(self.prefixes) - 1)
            else:
                self.push(": ")
        elif tag in ("ul", "ol", "menu", "dir"):
            self.need(1 if self.counters else 2)
            self.counters.append(integer(element.get("start"), 1) if tag == "ol" else None)
            self.numerals.append(element.get("type") or "1")
        elif tag == "blockquote":
            self.need(2)
            self.push("> ")
        elif tag == "table":
            layout = bool(_is_layout_table(element))
            self.layout.append(layout)
            self.in_table = not layout
            self.need(2)
        else:
            self.need(2 if tag in _PARAGRAPHS else 1)

    def close_block(self, tag: str) -> None:
        if self.in_table:
            self.close_in_table(tag)
            return
        if self.inline:
            self.flush()
        if tag == "li":
            self.pop()
            self.need(1)
        elif tag in ("dd", "blockquote"):
            self.pop()
            self.need(2 if tag == "blockquote" else 1)
        elif tag in ("ul", "ol", "menu", "dir"):
            if self.counters:
                self.counters.pop()
                self.numerals.pop()
            self.need(1 if self.counters else 2)
        elif tag == "table":
            self.layout.pop()
            self.need(2)
        elif tag in _HEADINGS:
            self.heading = ""
            self.need(2)
        else:
            self.need(2 if tag in _PARAGRAPHS else 1)

    def close_in_table(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.cells.append(collapsed("".join(self.inline).replace(BREAK, " ")))
            self.inline.clear()
        elif tag == "tr":
            self.rows.append(self.cells)
            self.cells = []
        elif tag == "caption":
            self.in_table = False
            self.flush()
            self.in_table = True
            self.need(1)
        elif tag == "table":
            self.in_table = False
            self.layout.pop()
            rows, self.rows, self.cells = [*self.rows, self.cells], [], []
            self.flush()
            if written := pipe_table(rows):
                self.emit(written.split("\n"))
            self.need(2)
        else:
            self.inline.append(BREAK)

    def open_item(self, element: Any) -> None:
        if not self.counters:
            self.need(1)
            self.push("- ")
            return
        number = self.counters[-1]
        self.gap = max(self.gap, 1) if not self.lines or (self.gap == 2 and is_first_item(element)) else 1
        if number is None:
            self.push("- ")
            return
        number = integer(element.get("value"), number)
        self.counters[-1] = number + 1
        self.push(f"{numeral(number, self.numerals[-1])}. ")

    def special(self, element: Any, tag: str) -> bool:
        """What a tag with rules of its own adds; true where nothing inside it is to be read any more."""
        inline = self.inline
        if tag == "br":
            inline.append(BREAK)
        elif tag in _VERBATIM:
            self.verbatim(element)
        elif tag == "math":
            self.formula(math_to_tex(element), element.get("display") == "block")
        elif tag == "script":
            kind = element.get("type") or ""
            if kind.startswith("math/tex"):
                self.formula(clean_tex(element.text or ""), "display" in kind)
        elif tag == "img":
            name = element.get("class") or ""
            if name and ("latex" in name or "math" in name or name == "tex") and (alt := element.get("alt")):
                self.formula(clean_tex(alt), "display" in name or "block" in name)
        elif tag in ("sub", "sup"):
            return self.script(element, tag)
        elif tag == "hr":
            if not self.in_table:
                self.flush()
                self.need(2)
                self.emit(["---"])
                self.need(2)
        else:
            inline.append({"code": "`", "q": "“", "rt": "("}[tag])
            return False
        return True

    def close_special(self, element: Any) -> None:
        tag = element.tag
        if tag == "code":
            # Empty code, or code that only wraps blocks which were written already, leaves no quotes behind.
            if self.inline and self.inline[-1] == "`":
                self.inline.pop()
            elif self.inline:
                self.inline.append("`")
        elif tag == "q":
            self.inline.append("”")
        elif tag == "rt":
            self.inline.append(")")

    def formula(self, tex: str, displayed: bool) -> None:
        if not tex:
            return
        previous = "".join(self.inline[-2:]).rstrip()
        # Pages often carry one formula twice: as MathML and as an image of it, or as a script.
        if previous.endswith((f"${tex}$", f"${tex}$${BREAK}")):
            return
        self.inline.append(f"{BREAK}$${tex}$${BREAK}" if displayed else f"${tex}$")

    def script(self, element: Any, tag: str) -> bool:
        if len(element) and element.xpath("boolean(.//math|.//script|.//img|.//br|.//p|.//div)"):
            return False
        text = collapsed(element.xpath("string(.)"))
        linked = len(element) > 0 and element.find(".//a") is not None
        before = self.inline[-1][-1:] if self.inline else ""
        written = subscript(text, before) if tag == "sub" else superscript(text, before, linked)
        self.inline.append(written)
        return True

    def verbatim(self, element: Any) -> None:
        text = preformatted(element)
        if self.in_table:
            self.inline.append(text)
            return
        self.flush()
        if not text.strip():
            return
        name = f"{element.get('class') or ''} {element[0].get('class') or '' if len(element) else ''}"
        code = element.find("code") is not None or _CODE_CLASS.search(name) is not None
        for around in islice(element.iterancestors(), 2):
            # Highlighters put their name, and the language, on what stands around.
            if _HIGHLIGHTER.search(found := around.get("class") or ""):
                code, name = True, f"{name} {found}"
        lines = text.split("\n")
        if code:
            found = _LANGUAGE_CLASS.search(name)
            fence = "```" if "```" not in text else "~~~~"
            language = found[1].lower() if found else ""
            lines = [fence + ("" if language in _NO_LANGUAGE else language), *lines, fence]
        self.need(2)
        self.emit(lines)
        self.need(2)

    def need(self, gap: int) -> None:
        """At least so many line breaks before the next line; the first line of a list item stays beside its mark."""
        if not self.marks and gap > self.gap:
            self.gap = gap

    def push(self, prefix: str) -> None:
        self.prefixes.append(prefix)
        self.marks.append(len(self.prefixes) - 1)

    def pop(self) -> None:
        if self.prefixes:
            self.prefixes.pop()
            if self.marks and self.marks[-1] >= len(self.prefixes):
                self.marks.pop()

    def flush(self) -> None:
        """The paragraph as lines: white space collapsed, `br` kept, two of them a blank line."""
        inline = self.inline
        if not inline:
            return
        text = inline[0] if len(inline) == 1 else "".join(inline)
        inline.clear()
        if BREAK in text:
            lines = broken(text)
            if not lines:
                return
            if self.heading:
                lines = [" ".join(line for line in lines if line)]
        else:
            text = collapsed(text)
            if not text:
                return
            lines = [text]
        if self.heading:
            title = _PERMALINK.sub("", lines[0])
            lines[0] = self.heading + title
            self.heading = ""
            if not title:
                return
        self.emit(lines)

    def emit(self, lines: list[str]) -> None:
        if not self.prefixes:
            if self.gap > 1 and self.lines:
                self.lines.append("")
            self.lines += lines
            self.gap = 1
            self.quotes_before = 0
            return
        quotes = self.prefixes.count("> ")
        if self.lines and self.gap > 1:
            self.lines.append(("> " * min(quotes, self.quotes_before)).rstrip())
        for line in lines:
            self.lines.append(("".join(self.prefixes[:_MOST_PREFIXES]) + line).rstrip())
            if self.marks:
                for place in self.marks:
                    mark = self.prefixes[place]
                    if mark != "> ":
                        self.prefixes[place] = " " * len(mark)
                self.marks.clear()
        self.gap = 1
        self.quotes_before = quotes
