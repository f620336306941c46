"""Convert lines to blocks: headings, paragraphs, lists, preformatted lines, tables."""

from __future__ import annotations

import re

from piledriver.corpus.formats.wikitext.marks import CELL, LINE_BREAK, PUT_ASIDE_START, VANISHED
from piledriver.corpus.formats.wikitext.tables import TABLE_START, TableParser

_HEADING = re.compile(r"(={1,6})(.+?)(={1,6})\s*")
_SPACES = re.compile("[ \t\xa0]{2,}")
_LIST = "*#:;"


class _Page:
    """The blocks so far. Headings wait until text follows them: an empty section is dropped."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self._waiting: list[tuple[int, str]] = []
        self._paragraph: list[str] = []
        self._items: list[str] = []
        self._numbers: list[int] = []

    def heading(self, level: int, title: str) -> None:
        self.end()
        while self._waiting and self._waiting[-1][0] >= level:
            self._waiting.pop()
        self._waiting.append((level, title))

    def line(self, text: str) -> None:
        if self._items:
            self.end()
        self._paragraph.append(text)

    def item(self, text: str) -> None:
        if self._paragraph:
            self.end()
        self._items.append(text)

    def number(self, depth: int) -> int:
        """Return the number of the next item of a numbered list at this depth."""
        if not self._items:
            self._numbers = []
        del self._numbers[depth:]
        self._numbers += [0] * (depth - len(self._numbers))
        self._numbers[-1] += 1
        return self._numbers[-1]

    def block(self, text: str) -> None:
        self.end()
        self._add(text)

    def end(self) -> None:
        if self._paragraph:
            # A line break inside a paragraph is a space, as in the rendered page.
            self._add(" ".join(self._paragraph))
            self._paragraph = []
        if self._items:
            self._add("\n".join(self._items))
            self._items = []

    def _add(self, text: str) -> None:
        text = text.replace(f" {LINE_BREAK}", "\n").replace(LINE_BREAK, "\n").strip()
        if text:
            self.blocks.extend(title for _, title in self._waiting)
            self._waiting = []
            self.blocks.append(text)


def blocks_to_text(text: str) -> str:
    """Return the text of a page whose inline markup was converted."""
    page = _Page()
    table: TableParser | None = None
    for line in text.split("\n"):
        bare = line.strip()
        if table is not None and bare[:2] == "==" and _HEADING.fullmatch(bare):
            # The table is not closed; a section follows.
            page.block(_cleaned(table.text(blocks_to_cell)))
            table = None
        if table is not None:
            table.line(bare)
            if table.finished:
                page.block(_cleaned(table.text(blocks_to_cell)))
                table = None
            continue
        if not bare:
            page.end()
            continue
        first = line[0]
        if TABLE_START.match(bare):
            table = TableParser(bare)
        elif first == "=" and (heading := _HEADING.fullmatch(line.rstrip())) is not None:
            title = _cleaned(heading.group(2).strip(" =").replace(LINE_BREAK, " "))
            if title:
                page.heading(min(len(heading.group(1)), len(heading.group(3))), title)
        elif first in _LIST:
            _list_line(page, line)
        elif bare.startswith("----"):
            page.end()
            if rest := _cleaned(bare.lstrip("-")):
                page.line(rest)
        elif first == " " and bare[0] not in (PUT_ASIDE_START, "|", "!"):
            if rest := _cleaned(bare):
                page.line(rest if not page._paragraph else LINE_BREAK + rest)
        elif first == "|":
            # The rest of a table that was closed too early.
            if bare[1:2] not in ("-", "}", "+") and (rest := _cleaned(bare.strip("|").rpartition("|")[2].strip())):
                page.line(rest)
        elif bare[0] == CELL:
            page.block(_cleaned(_cells(bare)))
        elif rest := _cleaned(bare):
            page.line(rest)
    if table is not None:
        page.block(_cleaned(table.text(blocks_to_cell)))
    page.end()
    return "\n\n".join(page.blocks)


def blocks_to_cell(lines: list[str]) -> str:
    """Return the text of a table cell; a single line needs no blocks."""
    if len(lines) == 1 and lines[0][:1] not in _LIST:
        return lines[0]
    return blocks_to_text("\n".join(lines))


def _list_line(page: _Page, line: str) -> None:
    marks = len(line) - len(line.lstrip(_LIST))
    prefix, rest = line[:marks], line[marks:].strip().lstrip(",;: ")
    rest = _cleaned(rest.replace(LINE_BREAK, " "))
    if not rest.strip(" -–—.,;:|/·•") or TABLE_START.match(rest):
        return
    kind = prefix[-1]
    if prefix == ":":
        # A single indent sets off quotations and formulas: a paragraph.
        page.block(rest)
        return
    if kind == ";":
        page.end()
        page.item(rest.replace(" :", ":", 1))
        return
    depth = sum(1 for mark in prefix if mark in "*#") or 1
    indent = "  " * (depth - 1)
    if kind == "#":
        page.item(f"{indent}{page.number(depth)}. {rest}")
    elif kind == "*":
        page.item(f"{indent}- {rest}")
    else:
        page.item(f"{'  ' * depth if '*' in prefix or '#' in prefix else ''}{rest}")


def _cells(line: str) -> str:
    return " | ".join(cell.strip() for cell in line.split(CELL)[1:])


def _cleaned(text: str) -> str:
    if VANISHED in text:
        text = text.replace(VANISHED, "")
    if CELL in text:
        text = text.replace(CELL, " | ")
    return _SPACES.sub(" ", text) if "  " in text or "\xa0" in text or "\t" in text else text
