"""Convert `{| ... |}` to rows of text, with nested tables on a stack instead of recursion."""

from __future__ import annotations

import re
from collections.abc import Callable

from piledriver.corpus.formats.wikitext.marks import CELL, LINE_BREAK, VANISHED

TABLE_START = re.compile(r"[:*#\s]*\{\|")
_MAX_NESTING = 20
_HEADER_CELLS = re.compile(r"!!|\|\|")


class _Table:
    """One open table: rows of cells, each a list of lines."""

    __slots__ = ("caption", "rows")

    def __init__(self) -> None:
        self.caption: list[str] = []
        self.rows: list[list[list[str]]] = [[]]

    def add(self, cell: str) -> None:
        self.rows[-1].append([cell])

    def continue_cell(self, line: str) -> None:
        if self.rows[-1]:
            self.rows[-1][-1].append(line)
        elif self.caption:
            self.caption.append(line)


class TableParser:
    """Parse the lines of a table one by one, after its first line."""

    def __init__(self, first_line: str) -> None:
        self._stack = [_Table()]
        self._too_deep = 0
        self._result: _Table | None = None

    @property
    def finished(self) -> bool:
        return self._result is not None

    def line(self, line: str) -> None:
        """Parse the next line, without spaces around it."""
        table = self._stack[-1]
        first = line[:1]
        if first == "{" and line.startswith("{|"):
            if len(self._stack) < _MAX_NESTING:
                self._stack.append(_Table())
            else:
                self._too_deep += 1
        elif first == "|":
            second = line[1:2]
            if second == "}":
                self._close(line[2:].strip())
            elif second == "-":
                if table.rows[-1]:
                    table.rows.append([])
            elif second == "+":
                table.caption.append(_content(line[2:]))
            else:
                for cell in line[1:].split("||"):
                    table.add(_content(cell))
        elif first == "!":
            for cell in _HEADER_CELLS.split(line[1:]):
                table.add(_content(cell))
        else:
            table.continue_cell(line)

    def text(self, cell_to_text: Callable[[list[str]], str]) -> str:
        """Return the table as lines, one for each row, with ` | ` between cells."""
        while self._result is None:
            self._too_deep = 0
            self._close("")
        lines = []
        caption = _one_line(" ".join(self._result.caption))
        if caption:
            lines.append(caption)
        for row in self._result.rows:
            cells = [cell_to_text(cell).replace(VANISHED, "").replace(CELL, " ").strip() for cell in row]
            while cells and not cells[-1]:
                cells.pop()
            if not any(cells):
                continue
            if len(cells) > 1 and any("\n" in cell for cell in cells) and max(map(len, cells)) > 200:
                # A table for layout: its blocks of text, one after the other.
                lines.append("\n\n".join(cell for cell in cells if cell))
            else:
                lines.append(" | ".join(_one_line(cell) for cell in cells) if len(cells) > 1 else cells[0])
        return "\n".join(lines)

    def _close(self, rest: str) -> None:
        if self._too_deep:
            self._too_deep -= 1
            return
        done = self._stack.pop()
        if not self._stack:
            self._result = done
            return
        outer = self._stack[-1]
        for row in done.rows:
            shown = [text for cell in row if (text := _one_line(" ".join(cell)))]
            if shown:
                outer.continue_cell(LINE_BREAK + " | ".join(shown) if len(shown) > 1 else shown[0])
        if rest:
            outer.continue_cell(rest)


def _content(cell: str) -> str:
    # `style="..." | text`: attributes end at the first bar; links, which have bars too, were converted before.
    before, bar, after = cell.partition("|")
    return after.strip() if bar else before.strip()


def _one_line(text: str) -> str:
    return " ".join(text.replace(LINE_BREAK, " ").replace(VANISHED, "").split())
