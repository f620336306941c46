"""How the blocks of HTML look in plain text: paragraphs, headings, lists, quotations, definitions, tables, code.

`TextWriter` is told what begins and ends and keeps the lines; where the events come from (`html_render` walks a tree,
`html_plain` scans markup) is no concern of it.
"""

from __future__ import annotations

import re

from piledriver.corpus.formats.html.scripts import words
from piledriver.corpus.formats.html.whitespace import BREAK, broken, collapsed, integer, numeral
from piledriver.corpus.formats.markdown import pipe_table

_MOST_PREFIXES = 12
_CODE_CLASS = re.compile(r"code|prettyprint|highlight|brush|lang|syntax|source|crayon|hljs", re.IGNORECASE)
_LANGUAGE_CLASS = re.compile(
    r"(?:^|[\s:])(?:lang(?:uage)?|highlight(?:-source|-text)?|brush)[-:]\s*([\w+#.-]{1,20})", re.IGNORECASE
)
_NO_LANGUAGE = words("default none source text plain plaintext notranslate code auto")
# The link to a heading that generators of pages put behind it.
_PERMALINK = re.compile(r"(?:\s*[¶🔗]|\s+[#§])$")


class TextWriter:
    """The text so far, the paragraph that is being filled, and the marks that stand before the next line."""

    heading = ""
    gap = 0
    quotes_before = 0
    # Data tables are not nested (one that holds another is layout), so one row at a time is enough.
    in_table = False
    code_depth = code_start = 0

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.inline: list[str] = []
        self.prefixes: list[str] = []
        # Places in `prefixes` of list marks that no line has carried yet.
        self.marks: list[int] = []
        self.counters: list[int | None] = []
        self.numerals: list[str] = []
        self.layout: list[bool] = []
        self.rows: list[list[str]] = []
        self.cells: list[str] = []

    def finished(self) -> str:
        """All of the text."""
        self.flush()
        return "\n".join(self.lines)

    def stand_apart(self, gap: int) -> None:
        """What comes next is not in the same paragraph as what came before."""
        inline = self.inline
        if self.in_table:
            inline.append(BREAK)
            return
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

    def paragraphs(self, paragraphs: list[str]) -> None:
        """Several at once, outside of lists and quotations, with nothing in the line."""
        if self.gap > 1 and self.lines:
            self.lines.append("")
        written = "\n\n".join(paragraphs)
        if BREAK in written:
            written = "\n\n".join("\n".join(broken(paragraph)) for paragraph in paragraphs)
        self.lines.append(written)
        self.gap = 2
        self.quotes_before = 0

    def open_heading(self, level: int) -> None:
        """A heading begins."""
        self.need(2)
        self.heading = "#" * level + " "

    def close_heading(self) -> None:
        """It ends."""
        self.heading = ""
        self.need(2)

    def open_list(self, start: str | None, style: str | None, *, numbered: bool) -> None:
        """A list begins, inside another or not."""
        self.need(1 if self.counters else 2)
        self.counters.append(integer(start, 1) if numbered else None)
        self.numerals.append(style or "1")

    def close_list(self) -> None:
        """The innermost list ends."""
        if self.counters:
            self.counters.pop()
            self.numerals.pop()
        self.need(1 if self.counters else 2)

    def open_item(self, value: str | None, *, first: bool) -> None:
        """An item of the innermost list; only the first may stand apart from what is before."""
        if not self.counters:
            self.need(1)
            self.push("- ")
            return
        number = self.counters[-1]
        self.gap = max(self.gap, 1) if not self.lines or (self.gap == 2 and first) else 1
        if number is None:
            self.push("- ")
            return
        number = integer(value, number)
        self.counters[-1] = number + 1
        self.push(f"{numeral(number, self.numerals[-1])}. ")

    def close_item(self) -> None:
        """The item ends."""
        self.pop()
        self.need(1)

    def open_definition(self, *, inside_another: bool) -> None:
        """A definition; inside another only where an end tag was left out: then it is the next one."""
        self.need(1)
        if self.prefixes and inside_another:
            self.prefixes[-1] = ": "
            self.marks.append(len(self.prefixes) - 1)
        else:
            self.push(": ")

    def open_quotation(self) -> None:
        """A quotation of whole paragraphs."""
        self.need(2)
        self.push("> ")

    def close_quotation(self) -> None:
        """It ends."""
        self.pop()
        self.need(2)

    def open_table(self, *, layout: bool) -> None:
        """A table of data, or one that only lays out what stands in it."""
        self.layout.append(layout)
        self.in_table = not layout
        self.need(2)

    def close_table(self) -> None:
        """The table ends; the rows of a data table are written now."""
        if self.in_table:
            self.in_table = False
            rows, self.rows, self.cells = [*self.rows, self.cells], [], []
            self.flush()
            if written := pipe_table(rows):
                self.emit(written.split("\n"))
        self.layout.pop()
        self.need(2)

    def close_cell(self) -> None:
        """A cell of a data table is full."""
        self.cells.append(collapsed("".join(self.inline).replace(BREAK, " ")))
        self.inline.clear()

    def close_row(self) -> None:
        """So is a row."""
        self.rows.append(self.cells)
        self.cells = []

    def close_caption(self) -> None:
        """The caption of a data table stands before it."""
        self.in_table = False
        self.flush()
        self.in_table = True
        self.need(1)

    def open_code(self) -> None:
        """Code within a line; inside other code it is more of the same."""
        self.code_depth += 1
        if self.code_depth == 1:
            self.inline.append("`")
            self.code_start = len(self.inline)

    def close_code(self) -> None:
        """The end of it."""
        self.code_depth -= 1
        # Empty code, or code that only wraps blocks which were written already, leaves no quotes behind.
        if self.code_depth or not self.inline:
            return
        if len(self.inline) == self.code_start and self.inline[-1] == "`":
            self.inline.pop()
        else:
            self.inline.append("`")

    def rule(self) -> None:
        """A line across the page."""
        if not self.in_table:
            self.flush()
            self.need(2)
            self.emit(["---"])
            self.need(2)

    def formula(self, tex: str, *, displayed: bool) -> None:
        """Mathematics as LaTeX."""
        if not tex:
            return
        previous = "".join(self.inline[-2:]).rstrip()
        # Pages often carry one formula twice: as MathML and as an image of it, or as a script.
        if previous.endswith((f"${tex}$", f"${tex}$${BREAK}")):
            return
        self.inline.append(f"{BREAK}$${tex}$${BREAK}" if displayed else f"${tex}$")

    def verbatim(self, text: str, classes: str, *, code: bool) -> None:
        """Preformatted text; where it is code, or a class says so, in a fence with the language that a class names."""
        if self.in_table:
            self.inline.append(text)
            return
        self.flush()
        if not text.strip():
            return
        lines = text.split("\n")
        if code or _CODE_CLASS.search(classes) is not None:
            found = _LANGUAGE_CLASS.search(classes)
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
        """What stands before every line from now on."""
        self.prefixes.append(prefix)
        self.marks.append(len(self.prefixes) - 1)

    def pop(self) -> None:
        """No longer."""
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
        """Lines below all that was written, each behind the marks of the blocks that it stands in."""
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
