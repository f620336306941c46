"""Convert the lines of a PDF to paragraphs: drop headers, footers and page numbers, join words and lines."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from statistics import median

from piledriver.corpus.formats.pdf.columns import in_reading_order
from piledriver.corpus.formats.pdf.lines import Line, pdf_pages

_LIGATURES = str.maketrans({
    "ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st", "\xa0": " ", "\u2028": " ",
    "\ufffd": "",
})  # fmt: skip
_PAGE_NUMBER = re.compile(
    r"\W{0,3}(?:page\s+)?(?:\d{1,4}|[ivxlc]{1,7})(?:\s*(?:of|/)\s*\d{1,4})?\W{0,3}", re.IGNORECASE
)
_DIGITS = re.compile(r"\d+")
_BULLET = re.compile(r"[•◦▪■●–—*\x0f\uf0b7\uf0a7]\s+|\(?(?:\d{1,2}|[a-z])[.)]\s+\S")
_SYMBOL_BULLET = re.compile(r"^[\x0f\x8f\x88\uf0b7\uf0a7\uf02d]\s*")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_OPEN_END = re.compile(r"(?:,|\b(?:of|the|and|or|a|an|to|in|for|with|by|on|at|from|as|is|are|that|which))$")
_INITIAL = re.compile(r"(?:^|\W)[A-Z]\.$")
_YEAR = re.compile(r"(?:19|20)\d\d[a-z]?\.$")
_SENTENCE_END = (".", "?", "!", ":", ".”", ".’", '."', ".)", "?”", "。")
EDGE_LINES = 4


def pdf_to_text(content: bytes) -> str:
    """Return the text of a PDF in paragraphs, in the order of the file."""
    read = list(pdf_pages(content))
    furniture = _furniture(read)
    words: Counter[str] = Counter()
    kept: list[list[Line]] = []
    for (lines, _), dropped in zip(read, furniture, strict=True):
        page = in_reading_order([line for index, line in enumerate(lines) if index not in dropped])
        for line in page:
            words.update(word.lower() for word in _WORD.findall(line.text))
        kept.append(page)
    return "\n\n".join(_paragraphs(kept, words))


def _furniture(read: list[tuple[list[Line], float]]) -> list[set[int]]:
    """Return for each page the indices of headers, footers and page numbers: lines at the edge that pages repeat."""
    edges: list[list[int]] = []
    seen: Counter[str] = Counter()
    for lines, _ in read:
        order = sorted(range(len(lines)), key=lambda index: lines[index].bottom)
        edge = [*order[:EDGE_LINES], *order[-EDGE_LINES:]] if len(order) > 2 * EDGE_LINES else order
        edges.append(edge)
        seen.update({_pattern(lines[index].text) for index in edge})
    enough = max(3, len(read) * 0.25) if len(read) > 3 else 2
    out = []
    for (lines, height), edge in zip(read, edges, strict=True):
        dropped = set()
        for index in edge:
            line = lines[index]
            outside = line.bottom < 0.12 * height or line.bottom > 0.86 * height
            repeated = len(read) > 1 and seen[_pattern(line.text)] >= enough and len(line.text) < 150
            number = _PAGE_NUMBER.fullmatch(line.text) is not None and len(read) > 1 and len(line.text) < 16
            if outside and (repeated or number):
                dropped.add(index)
        out.append(dropped)
    return out


def _pattern(text: str) -> str:
    return _DIGITS.sub("#", text.lower()).strip()


def _paragraphs(kept: list[list[Line]], words: Counter[str]) -> Iterator[str]:
    """Yield paragraphs; one may continue in the next column or on the next page."""
    paragraph: list[Line] = []
    for lines in kept:
        steps = [
            above.bottom - line.bottom
            for above, line in itertools.pairwise(lines)
            if 0.5 * line.height < above.bottom - line.bottom < 3 * line.height
        ]
        leading = median(steps) if steps else 0.0
        for index, line in enumerate(lines):
            near = lines[max(0, index - 2) : index + 2]
            if paragraph and not _continues(paragraph, line, leading, near, turned=index == 0):
                yield _joined(paragraph, words)
                paragraph = []
            paragraph.append(line)
    if paragraph:
        yield _joined(paragraph, words)


def _continues(paragraph: list[Line], line: Line, leading: float, near: list[Line], *, turned: bool) -> bool:
    """Return whether a line belongs to the paragraph before it; `turned` where it is the first of its page."""
    last = paragraph[-1]
    if last.hyphenated:
        return True
    step = -1e9 if turned else last.bottom - line.bottom
    height = max(last.height, line.height, 1.0)
    if abs(step) < 0.4 * height:
        # The same line, split by something between.
        return line.left >= last.left
    ended = last.text.endswith(_SENTENCE_END) and not _INITIAL.search(last.text[-4:])
    if ended and len(paragraph) < 5 and _YEAR.search(last.text[-7:]) and 0 < step < 2 * height:
        # An entry of a bibliography, whose later lines are indented, continues after the year.
        ended = line.left < paragraph[0].left + 0.5 * height
    similar = 0.85 < line.height / max(last.height, 0.1) < 1.18
    if not similar:
        return not ended and line.text[:1].islower() and 0 < step < 2 * height
    if _BULLET.match(line.text) and ended:
        return False
    if step < 0 or step > max(1.45 * leading, 1.05 * height):
        # Another column, another page, or a gap: only an unfinished sentence continues.
        moved = step < 0 or step > 8 * height
        return moved and not ended and line.text[:1].islower()
    indented = line.left - min(part.left for part in paragraph[-3:]) > 0.7 * height
    if indented and (ended or len(paragraph) == 1) and not line.text[:1].islower():
        return len(paragraph) == 1 and not ended
    column = [part for part in near if part.left < last.right and part.right > last.left] or [last]
    left, right = min(part.left for part in column), max(part.right for part in column)
    filled = (last.right - last.left) / max(right - left, 1.0)
    heading = len(paragraph) == 1 and filled < 0.75 and line.text[:1].isupper() and not _OPEN_END.search(last.text)
    return not (filled < 0.88 and (ended or heading))


def _joined(lines: list[Line], words: Counter[str]) -> str:
    rows = _rows(lines)
    out = rows[0][0]
    tabular = [_is_row(text) for text, _ in rows] + [False]
    for index, ((_, hyphenated), (text, _)) in enumerate(itertools.pairwise(rows), 1):
        if hyphenated:
            out += _hyphen(out, text, words) + text
        elif out.endswith("-") and out[-2:-1].isalpha() and text[:1].islower():
            out = out[:-1]
            out += _hyphen(out, text, words) + text
        else:
            # The rows of a table stay lines.
            out += f"\n{text}" if tabular[index] and (tabular[index - 1] or tabular[index + 1]) else f" {text}"
    return "\n".join(" ".join(row.split()) for row in out.split("\n"))


def _rows(lines: list[Line]) -> list[tuple[str, bool]]:
    """Return (text, whether it ends in a hyphen) of each row; parts on one baseline are joined."""
    rows: list[tuple[str, bool]] = []
    for index, line in enumerate(lines):
        text = _SYMBOL_BULLET.sub("• ", line.text.translate(_LIGATURES))
        above = lines[index - 1]
        if index and abs(above.bottom - line.bottom) < 0.4 * max(line.height, 1.0) and not above.hyphenated:
            rows[-1] = (f"{rows[-1][0]} {text}", line.hyphenated)
        else:
            rows.append((text, line.hyphenated))
    return rows


def _is_row(text: str) -> bool:
    parts = text.split()
    numbers = sum(part[0].isdigit() or part[-1].isdigit() for part in parts)
    return numbers >= 2 and 5 * numbers >= 2 * len(parts)


def _hyphen(before: str, after: str, words: Counter[str]) -> str:
    """Return the hyphen at the end of a line, or an empty string, by the spelling in the rest of the document."""
    left, right = _WORD.findall(before[-60:])[-1:], _WORD.match(after)
    if not left or right is None or not before[-1:].isalpha():
        return "-"
    whole, parts = (left[0] + right[0]).lower(), f"{left[0]}-{right[0]}".lower()
    if words[parts] != words[whole]:
        return "-" if words[parts] > words[whole] else ""
    return "-" if right[0][0].isupper() or left[0].isupper() else ""
