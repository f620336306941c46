"""The lines of a PDF with where they stand, page by page, in the order in which they were written."""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from piledriver.core.errors import MissingDependencyError

MAX_PAGES = 10_000
MAX_CHARACTERS = 50_000_000
# pdfium's own sign for a hyphen at the end of a line.
HYPHEN = "\ufffe"


@dataclass(slots=True)
class Line:
    """One line: its text, and its box in points from the lower left corner of the page."""

    text: str
    left: float
    right: float
    bottom: float
    height: float
    hyphenated: bool = False


class UnreadablePdfError(ValueError):
    """The file is no PDF that can be opened; `encrypted` where a password is missing."""

    def __init__(self, what: str, encrypted: bool = False) -> None:
        super().__init__(what)
        self.encrypted = encrypted


def pages(content: bytes) -> Iterator[tuple[list[Line], float]]:
    """(lines, height of the page) of each page; more pages or characters than the limits end it."""
    pdfium = _pdfium()
    try:
        document = pdfium.PdfDocument(content)
    except pdfium.PdfiumError as error:
        raise UnreadablePdfError(str(error), encrypted="assword" in str(error)) from error
    characters = 0
    try:
        for number in range(min(len(document), MAX_PAGES)):
            try:
                page = document[number]
                text_page = page.get_textpage()
            except pdfium.PdfiumError:
                continue
            lines = _lines(pdfium.raw, text_page)
            characters += sum(len(line.text) for line in lines)
            yield lines, page.get_height()
            text_page.close()
            page.close()
            if characters > MAX_CHARACTERS:
                return
    finally:
        document.close()


def metadata(content: bytes) -> dict[str, str]:
    """Title and date as the file says them, where it does."""
    pdfium = _pdfium()
    try:
        document = pdfium.PdfDocument(content)
        found = document.get_metadata_dict(skip_empty=True)
        document.close()
    except pdfium.PdfiumError:
        return {}
    out = {"title": " ".join(found.get("Title", "").split())[:500]}
    date = found.get("CreationDate", "").removeprefix("D:")[:8]
    if len(date) == 8 and date.isdecimal():
        out["date"] = f"{date[:4]}-{date[4:6]}-{date[6:]}"
    return {name: value for name, value in out.items() if value}


def _pdfium() -> Any:
    try:
        return importlib.import_module("pypdfium2")
    except ImportError:
        raise MissingDependencyError("pypdfium2", extra="corpus", purpose="reading PDF files") from None


def _lines(raw: Any, text_page: Any) -> list[Line]:
    count = text_page.count_chars()
    if count <= 0:
        return []
    text = _text(raw, text_page, count)
    handle = text_page.raw
    box = raw.FS_RECTF()
    reference = ctypes.byref(box)
    lines: list[Line] = []
    start = 0
    for index in range(count + 1):
        if index < count and text[index] not in "\r\n\ufffe":
            continue
        first, last = start, index - 1
        start = index + 1
        while first <= last and text[first].isspace():
            first += 1
        while last >= first and text[last].isspace():
            last -= 1
        if first > last:
            continue
        if not raw.FPDFText_GetLooseCharBox(handle, first, reference):
            continue
        left, bottom, height = box.left, box.bottom, box.top - box.bottom
        # Text that runs up the margin is a stamp of the publisher or an axis of a picture.
        angle = raw.FPDFText_GetCharAngle(handle, first)
        if angle > 0 and abs(math.sin(angle)) > 0.5:
            continue
        raw.FPDFText_GetLooseCharBox(handle, last, reference)
        hyphenated = index < count and text[index] == HYPHEN
        height = max(height, box.top - box.bottom)
        lines.append(Line(text[first : last + 1], left, box.right, min(bottom, box.bottom), height, hyphenated))
    return lines


def _text(raw: Any, text_page: Any, count: int) -> str:
    text: str = text_page.get_text_range()
    if len(text) == count:
        return text
    # Characters beyond the first plane or without a meaning shift the string: read them one by one.
    handle = text_page.raw
    codes = [raw.FPDFText_GetUnicode(handle, index) for index in range(count)]
    return "".join(HYPHEN if code in (2, 0xFFFE) else chr(code) if 0 < code < 0x110000 else "\ufffd" for code in codes)
