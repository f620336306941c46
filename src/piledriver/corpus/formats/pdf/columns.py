"""Sort the lines of pages in columns that were written row by row."""

from __future__ import annotations

import itertools
from statistics import median

from piledriver.corpus.formats.pdf.lines import Line

MIN_LINES = 20
MIN_CHARACTERS = 18
MIN_GUTTER = 5
MAX_COLUMNS = 4


def in_reading_order(lines: list[Line]) -> list[Line]:
    """Return the lines of a page in reading order, column after column.

    Most files write column by column and keep their order. A page is sorted only where many neighbours in the file are
    on the same row in different columns of prose: lines that span the columns divide it into bands, and in each band
    the columns are read from left to right. Tables look the same, but have short cells.
    """
    if len(lines) < MIN_LINES or _rows_shared(lines) < 0.25 * len(lines):
        return lines
    if median(len(line.text) for line in lines) < MIN_CHARACTERS:
        return lines
    gutters = _gutters(lines)
    if not gutters:
        return lines
    out: list[Line] = []
    band: list[Line] = []
    for line in sorted(lines, key=lambda line: -line.bottom):
        if any(line.left < gutter - 2 and line.right > gutter + 2 for gutter in gutters):
            out += _by_column(band, gutters)
            band = []
            out.append(line)
        else:
            band.append(line)
    return out + _by_column(band, gutters)


def _rows_shared(lines: list[Line]) -> int:
    return sum(
        abs(above.bottom - line.bottom) < 0.5 * line.height and (line.left > above.right or line.right < above.left)
        for above, line in itertools.pairwise(lines)
    )


def _gutters(lines: list[Line]) -> list[float]:
    """Return the middles of the vertical strips that nearly no line crosses, between the outer margins of the text."""
    left, right = min(line.left for line in lines), max(line.right for line in lines)
    width = int(right - left)
    if not 100 < width < 5000:
        return []
    changes = [0] * (width + 2)
    for line in lines:
        changes[max(0, int(line.left - left))] += 1
        changes[min(width + 1, int(line.right - left) + 1)] -= 1
    limit = 0.06 * len(lines)
    gutters: list[float] = []
    covered, start = 0, -1
    for x, change in enumerate(changes):
        covered += change
        if covered <= limit and 0.15 * width < x < 0.85 * width:
            start = x if start < 0 else start
        elif start >= 0:
            if x - start >= MIN_GUTTER:
                gutters.append(left + (start + x) / 2)
            start = -1
    return gutters if len(gutters) < MAX_COLUMNS else []


def _by_column(band: list[Line], gutters: list[float]) -> list[Line]:
    return sorted(band, key=lambda line: (sum(line.left > gutter for gutter in gutters), -line.bottom, line.left))
