"""The lines of a PDF with their boxes, page by page, in the order of the file."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from piledriver.core.errors import MissingDependencyError
from piledriver.corpus.document import RejectedError

MAX_PAGES = 10_000
MAX_CHARACTERS = 50_000_000
# Only a line of at least this share of the page's width may cross columns; a gap of this many line heights divides
# columns; a page on which so many wide lines in a row have no gap has no columns.
MIN_SPLIT_WIDTH = 0.45
COLUMN_GAP = 1.0
ENOUGH_WHOLE_LINES = 20
# pdfium's own sign for a hyphen at the end of a line.
HYPHEN = "\ufffe"
_LINE_END = re.compile("[\r\n\ufffe]")


@dataclass(slots=True)
class Line:
    """One line: its text, and its box in points from the lower left corner of the page."""

    text: str
    left: float
    right: float
    bottom: float
    height: float
    hyphenated: bool = False


class UnreadablePdfError(RejectedError):
    """A PDF that cannot be opened: damaged, or encrypted."""


def pdf_pages(content: bytes) -> Iterator[tuple[list[Line], float]]:
    """Yield (lines, height) of each page, up to the limits on pages and characters."""
    pdfium = _pdfium()
    try:
        document = pdfium.PdfDocument(content)
    except pdfium.PdfiumError as error:
        reason = "encrypted pdf" if "assword" in str(error) else "damaged pdf"
        raise UnreadablePdfError(str(error), reason) from error
    characters = 0
    try:
        for number in range(min(len(document), MAX_PAGES)):
            try:
                page = document[number]
                text_page = page.get_textpage()
            except pdfium.PdfiumError:
                continue
            lines = _lines(pdfium.raw, text_page, page.get_width())
            characters += sum(len(line.text) for line in lines)
            yield lines, page.get_height()
            text_page.close()
            page.close()
            if characters > MAX_CHARACTERS:
                return
    finally:
        document.close()


def metadata(content: bytes) -> dict[str, str]:
    """Return title and date of the file's metadata, where present."""
    pdfium = _pdfium()
    try:
        document = pdfium.PdfDocument(content)
        found = document.get_metadata_dict(skip_empty=True)
        document.close()
    except pdfium.PdfiumError:
        return {}
    out = {"title": " ".join(found.get("Title", "").split())[:500]}
    date = found.get("CreationDate", "").removeprefix("D:")[:8]
    if len(date) == 8 and date.isdecimal() and "1980" < date[:4] < "2100":
        out["date"] = f"{date[:4]}-{date[4:6]}-{date[6:]}"
    return {name: value for name, value in out.items() if value}


def _pdfium() -> Any:
    try:
        return importlib.import_module("pypdfium2")
    except ImportError:
        raise MissingDependencyError("pypdfium2", extra="corpus", purpose="reading PDF files") from None


def _lines(raw: Any, text_page: Any, width: float) -> list[Line]:
    count = text_page.count_chars()
    if count <= 0:
        return []
    text = _text(raw, text_page, count)
    reader = _Boxes(raw, text_page.raw, MIN_SPLIT_WIDTH * width)
    lines: list[Line] = []
    start = 0
    for found in _LINE_END.finditer(text):
        _add_line(lines, text, start, found.start(), reader, hyphenated=found[0] == HYPHEN)
        start = found.end()
    _add_line(lines, text, start, count, reader, hyphenated=False)
    return lines


Box = tuple[float, float, float, float]
"""Left, right, bottom, top."""


class _Boxes:
    """The boxes of the characters of a page, and the gaps between them."""

    def __init__(self, raw: Any, handle: Any, wide: float) -> None:
        self._raw, self._handle, self._wide = raw, handle, wide
        self._whole_lines = 0
        self._box = raw.FS_RECTF()
        self._reference = ctypes.byref(self._box)

    def box(self, index: int) -> Box | None:
        if not self._raw.FPDFText_GetLooseCharBox(self._handle, index, self._reference):
            return None
        return self._box.left, self._box.right, self._box.bottom, self._box.top

    def runs_up(self, index: int) -> bool:
        """Return whether the text runs upwards: a stamp of the publisher or an axis of a picture."""
        angle = self._raw.FPDFText_GetCharAngle(self._handle, index)
        return angle > 0 and abs(math.sin(angle)) > 0.5

    def gaps(self, text: str, start: int, end: int, first: Box, last: Box) -> list[int]:
        """Return the indices of the spaces in a line that are as wide as between columns."""
        if 0 < last[1] - first[0] < self._wide or self._whole_lines >= ENOUGH_WHOLE_LINES:
            return []
        least = COLUMN_GAP * max(first[3] - first[2], 1.0)
        found = [at for at in range(start + 1, end - 1) if text[at] == " " and self.gap(at) > least]
        self._whole_lines = 0 if found else self._whole_lines + 1
        return found

    def gap(self, index: int) -> float:
        """Return the width of the space between two words on the page."""
        before, after = self.box(index - 1), self.box(index + 1)
        if before is None or after is None:
            return 0.0
        # Back to the left on the same line: another column, written before this one.
        return after[0] - before[1] if after[1] > before[0] else before[0] - after[1]


def _add_line(lines: list[Line], text: str, start: int, end: int, boxes: _Boxes, *, hyphenated: bool) -> None:
    """Add a line, or its parts where gaps as wide as between columns divide it."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    if start >= end or boxes.runs_up(start):
        return
    cuts = [start]
    first, last = boxes.box(start), boxes.box(end - 1)
    if first is None or last is None:
        return
    cuts += [at + 1 for at in boxes.gaps(text, start, end, first, last)]
    cuts.append(end + 1)
    for left, right in itertools.pairwise(cuts):
        head, tail = boxes.box(left), boxes.box(right - 2)
        if head is None or tail is None:
            continue
        height = max(head[3] - head[2], tail[3] - tail[2])
        part = text[left : right - 1].strip()
        if part:
            lines.append(Line(part, head[0], tail[1], min(head[2], tail[2]), height, hyphenated and right > end))


def _text(raw: Any, text_page: Any, count: int) -> str:
    text: str = text_page.get_text_range()
    if len(text) == count:
        return text
    # Characters beyond the first plane or without a code shift the string: read them one by one.
    handle = text_page.raw
    codes = [raw.FPDFText_GetUnicode(handle, index) for index in range(count)]
    return "".join(HYPHEN if code in (2, 0xFFFE) else chr(code) if 0 < code < 0x110000 else "\ufffd" for code in codes)
