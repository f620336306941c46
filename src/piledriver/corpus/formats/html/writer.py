"""Write the blocks of HTML as plain text: paragraphs, headings, lists, quotations, definitions, tables, code."""

from __future__ import annotations

import re

from piledriver.corpus.formats.html.whitespace import BREAK, broken, collapsed, numeral, parse_integer
from piledriver.corpus.formats.markdown import pipe_table
from piledriver.corpus.text.data_table import word_set

_MOST_PREFIXES = 12
_CODE_CLASS = re.compile(r"code|prettyprint|highlight|brush|lang|syntax|source|crayon|hljs", re.IGNORECASE)
_LANGUAGE_CLASS = re.compile(
    r"(?:^|[\s:])(?:lang(?:uage)?|highlight(?:-source|-text)?|brush)[-:]\s*([\w+#.-]{1,20})", re.IGNORECASE
)
_NO_LANGUAGE = word_set("default none source text plain plaintext notranslate code auto")
# A generated link from a heading to itself.
_PERMALINK = re.compile(r"(?:\s*[¶🔗]|\s+[#§])$")


class TextWriter:
    """The lines written so far, the open paragraph, and the prefixes of the next line (list marks, quotes)."""

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
        # Indices in `prefixes` of list marks that no line shows yet.
        self.marks: list[int] = []
        self.counters: list[int | None] = []
        self.numerals: list[str] = []
        self.layout: list[bool] = []
        self.rows: list[list[str]] = []
        self.cells: list[str] = []

    def finished(self) -> str:
        """Return the whole text."""
        self.flush()
        return "\n".join(self.lines)

    def stand_apart(self, gap: int) -> None:
        """End the paragraph; at least `gap` line breaks follow it."""
        inline = self.inline
        if self.in_table:
            inline.append(BREAK)
            return
        if inline:
            if len(inline) == 1 and not self.prefixes and not self.heading and BREAK not in inline[0]:
                # Most text is plain paragraphs: the result of `flush` and `emit` without calling them.
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
        """Write several paragraphs at once, outside lists and quotations, with no open paragraph."""
        if self.gap > 1 and self.lines:
            self.lines.append("")
        written = "\n\n".join(paragraphs)
        if BREAK in written:
            written = "\n\n".join("\n".join(broken(paragraph)) for paragraph in paragraphs)
        self.lines.append(written)
        self.gap = 2
        self.quotes_before = 0

    def open_heading(self, level: int) -> None:
        """Begin a heading."""
        self.need(2)
        self.heading = "#" * level + " "

    def close_heading(self) -> None:
        """End it."""
        self.heading = ""
        self.need(2)

    def open_list(self, start: str | None, style: str | None, *, numbered: bool) -> None:
        """Begin a list, nested or not."""
        self.need(1 if self.counters else 2)
        self.counters.append(parse_integer(start, 1) if numbered else None)
        self.numerals.append(style or "1")

    def close_list(self) -> None:
        """End the innermost list."""
        if self.counters:
            self.counters.pop()
            self.numerals.pop()
        self.need(1 if self.counters else 2)

    def open_item(self, value: str | None, *, first: bool) -> None:
        """Begin an item of the innermost list; only the first may follow a blank line."""
        if not self.counters:
            self.need(1)
            self.push("- ")
            return
        number = self.counters[-1]
        self.gap = max(self.gap, 1) if not self.lines or (self.gap == 2 and first) else 1
        if number is None:
            self.push("- ")
            return
        number = parse_integer(value, number)
        self.counters[-1] = number + 1
        self.push(f"{numeral(number, self.numerals[-1])}. ")

    def close_item(self) -> None:
        """End the item."""
        self.pop()
        self.need(1)

    def open_definition(self, *, inside_another: bool) -> None:
        """Begin a definition; one inside another follows it (a missing end tag)."""
        self.need(1)
        if self.prefixes and inside_another:
            self.prefixes[-1] = ": "
            self.marks.append(len(self.prefixes) - 1)
        else:
            self.push(": ")

    def open_quotation(self) -> None:
        """Begin a quotation of paragraphs."""
        self.need(2)
        self.push("> ")

    def close_quotation(self) -> None:
        """End it."""
        self.pop()
        self.need(2)

    def open_table(self, *, layout: bool) -> None:
        """Begin a data table, or one that only arranges its content."""
        self.layout.append(layout)
        self.in_table = not layout
        self.need(2)

    def close_table(self) -> None:
        """End the table and write the rows of a data table."""
        if self.in_table:
            self.in_table = False
            rows, self.rows, self.cells = [*self.rows, self.cells], [], []
            self.flush()
            if written := pipe_table(rows):
                self.emit(written.split("\n"))
        self.layout.pop()
        self.need(2)

    def close_cell(self) -> None:
        """End a cell of a data table."""
        self.cells.append(collapsed("".join(self.inline).replace(BREAK, " ")))
        self.inline.clear()

    def close_row(self) -> None:
        """End a row of a data table."""
        self.rows.append(self.cells)
        self.cells = []

    def close_caption(self) -> None:
        """Write the caption of a data table before it."""
        self.in_table = False
        self.flush()
        self.in_table = True
        self.need(1)

    def open_code(self) -> None:
        """Begin inline code; nested code continues the outer one."""
        self.code_depth += 1
        if self.code_depth == 1:
            self.inline.append("`")
            self.code_start = len(self.inline)

    def close_code(self) -> None:
        """End inline code."""
        self.code_depth -= 1
        # Empty code, or code around blocks that are already written, leaves no backquotes.
        if self.code_depth or not self.inline:
            return
        if len(self.inline) == self.code_start and self.inline[-1] == "`":
            self.inline.pop()
        else:
            self.inline.append("`")

    def rule(self) -> None:
        """Write a horizontal rule."""
        if not self.in_table:
            self.flush()
            self.need(2)
            self.emit(["---"])
            self.need(2)

    def formula(self, tex: str, *, displayed: bool) -> None:
        """Write a formula in LaTeX."""
        if not tex:
            return
        previous = "".join(self.inline[-2:]).rstrip()
        # Pages often hold one formula twice: as MathML and as an image or a script.
        if previous.endswith((f"${tex}$", f"${tex}$${BREAK}")):
            return
        self.inline.append(f"{BREAK}$${tex}$${BREAK}" if displayed else f"${tex}$")

    def verbatim(self, text: str, classes: str, *, code: bool) -> None:
        """Write preformatted text; code, by its tag or class, in a fence with the language that a class names."""
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
        """Require line breaks before the next line; the first line of a list item stays beside its mark."""
        if not self.marks and gap > self.gap:
            self.gap = gap

    def push(self, prefix: str) -> None:
        """Add a prefix to every line from here on."""
        self.prefixes.append(prefix)
        self.marks.append(len(self.prefixes) - 1)

    def pop(self) -> None:
        """Remove the last prefix."""
        if self.prefixes:
            self.prefixes.pop()
            if self.marks and self.marks[-1] >= len(self.prefixes):
                self.marks.pop()

    def flush(self) -> None:
        """Write the open paragraph: white space collapsed, `br` kept, two of them a blank line."""
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
        """Append lines, each with the prefixes of the blocks around it."""
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
