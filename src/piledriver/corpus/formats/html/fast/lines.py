"""Text with marker bytes to lines: the compiled second half of the scanner.

`scan.py` removes the markup and leaves one marker byte for each tag that has a meaning; here these become paragraphs,
lists, quotations and headings, by the rules of `formats/html/writer.py`, which does the same for a tree.
"""

# ruff: noqa: SIM109 (plain comparisons compile faster)
from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import numpy.typing as npt

from piledriver.corpus.formats.html.fast.cache_key import CACHE_KEY

BREAK, LINE_GAP, GAP, QUOTE, QUOTE_END, LIST, LIST_END, BULLET = range(1, 9)
ITEM_END, NUMBER, HEADING_END, RULE, VERBATIM, END = range(14, 20)
HEADING = 20
"""A heading of the first level; the next five bytes are the other levels."""
DEEPEST = 60
DEEPER = DEEPEST + 4

_MOST_PREFIXES = 12
_SPACE, _NEWLINE, _TAB, _HASH, _HYPHEN, _GREATER = (ord(mark) for mark in " \n\t#->")
# Columns of an open block: whether it is a quotation, its marker (from, to), whether no line has shown that marker yet;
# of a list, whether it has no item yet.
_IS_QUOTE, _FROM, _TO, _IS_PENDING, _IS_FRESH = range(5)
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


@numba.njit(nogil=True)
def _write_lines(marked: Bytes, length: int, out: Bytes, blocks: Ints) -> int:
    """Write the lines of marked text, which begins at the second byte, and return where they end.

    Return -1 where a heading may end in a link to itself, or where lines are nested so deep that `out` is too small.
    `blocks` has room for five numbers of each open block; the fifth belongs to the list of that depth.
    """
    used = begun = needed = quotes_before = prefixes = pending = lists = heading = 0
    verbatim = False
    at = 1
    while at <= length:
        # Lines up to the next marker byte. Consecutive breaks leave one blank line.
        start = at
        if verbatim:
            while marked[at] != END:
                at += 1
        else:
            while at < length and (marked[at] >= _SPACE or marked[at] == BREAK):
                at += 1
        end = at
        divider = _NEWLINE if verbatim else BREAK
        any_line = blank = False
        while start <= end:
            first = start
            while start < end and marked[start] != divider:
                start += 1
            last = start
            start += 1
            if not verbatim:
                while first < last:
                    if marked[first] == _SPACE:
                        first += 1
                    elif last - first > 2 and is_wide_space(marked[first], marked[first + 1], marked[first + 2]):
                        first += 3
                    else:
                        break
                while first < last:
                    if marked[last - 1] == _SPACE:
                        last -= 1
                    elif last - first > 2 and is_wide_space(marked[last - 3], marked[last - 2], marked[last - 1]):
                        last -= 3
                    else:
                        break
                if first == last:
                    blank = any_line
                    continue
            if used + (last - first) + 40 * _MOST_PREFIXES + 2 * DEEPEST > out.size:
                return -1
            if not any_line:
                quotes = 0
                for place in range(prefixes):
                    quotes += blocks[place, _IS_QUOTE]
                if used > 0 and needed > 1:
                    out[used] = _NEWLINE
                    used += 1
                    for place in range(min(quotes, quotes_before)):
                        out[used] = _SPACE
                        used += 1 if place > 0 else 0
                        out[used] = _GREATER
                        used += 1
                needed = 1
                quotes_before = quotes
            # Each line follows the markers of the blocks around it, which are shown once and are spaces after that.
            lines = 2 if blank else 1
            blank = False
            if heading > 0 and any_line:
                # A heading is one line.
                out[used] = _SPACE
                used += 1
                lines = 0
            any_line = True
            while lines > 0:
                lines -= 1
                if used > 0:
                    out[used] = _NEWLINE
                    used += 1
                begun = used
                for place in range(min(prefixes, _MOST_PREFIXES)):
                    shown = blocks[place, _IS_PENDING] == 1
                    if blocks[place, _IS_QUOTE] == 1:
                        out[used] = _GREATER
                        used += 1
                    elif blocks[place, _FROM] == blocks[place, _TO]:
                        out[used] = _HYPHEN if shown else _SPACE
                        used += 1
                    for digit in range(blocks[place, _FROM], blocks[place, _TO]):
                        out[used] = marked[digit] if shown else _SPACE
                        used += 1
                    out[used] = _SPACE
                    used += 1
                while lines > 0 and used > begun and out[used - 1] == _SPACE:
                    used -= 1
                if heading > 0:
                    for _ in range(heading):
                        out[used] = _HASH
                        used += 1
                    out[used] = _SPACE
                    used += 1
            for place in range(first, last):
                out[used] = marked[place]
                used += 1
            if prefixes > 0:
                while used > begun and (out[used - 1] == _SPACE or out[used - 1] == _TAB):
                    used -= 1
                for place in range(prefixes):
                    blocks[place, _IS_PENDING] = 0
                pending = 0
        if any_line and heading > 0:
            # The last character of a heading may be a generated link to it.
            last_byte, before = out[used - 1], out[used - 2]
            if last_byte == _HASH or (before == 0xC2 and (last_byte == 0xB6 or last_byte == 0xA7)):
                return -1
            if last_byte == 0x97 and before == 0x94:
                return -1
            heading = 0

        mark = int(marked[at]) if at < length else END
        at += 1
        # Minimum number of line breaks before the next line; the first line of an item stays beside its marker.
        gap = 0
        if mark == GAP or mark == QUOTE or mark == RULE or mark == VERBATIM or mark == HEADING_END or mark >= HEADING:
            gap = 2
        elif mark == LINE_GAP:
            gap = 1
        elif mark == END:
            gap = 2 if verbatim else 0
        elif mark == LIST:
            gap = 1 if lists > 0 else 2
            blocks[lists, _IS_FRESH] = 1
            lists += 1
        elif mark == LIST_END:
            lists -= 1
            gap = 1 if lists > 0 else 2
        elif mark == QUOTE_END or mark == ITEM_END:
            prefixes -= 1
            pending -= blocks[prefixes, _IS_PENDING]
            gap = 2 if mark == QUOTE_END else 1
        elif mark == BULLET or mark == NUMBER:
            if used > 0 and not (needed == 2 and blocks[lists - 1, _IS_FRESH] == 1):
                needed = 1
            needed = max(needed, 1)
            blocks[lists - 1, _IS_FRESH] = 0
        if pending == 0 and gap > needed:
            needed = gap
        verbatim = mark == RULE or mark == VERBATIM
        heading = mark - HEADING + 1 if mark >= HEADING else 0
        if mark == QUOTE or mark == BULLET or mark == NUMBER:
            # The prefix of every line from here on.
            begin = at
            while mark == NUMBER and marked[at] != END:
                at += 1
            blocks[prefixes, _IS_QUOTE] = 1 if mark == QUOTE else 0
            blocks[prefixes, _FROM] = begin
            blocks[prefixes, _TO] = at
            blocks[prefixes, _IS_PENDING] = 1
            prefixes += 1
            pending += 1
            at += 1 if mark == NUMBER else 0
    return used


def _entry(key: int) -> Callable[[Bytes, int, Bytes, Ints], int]:
    @numba.njit(cache=True, nogil=True)
    def write_lines(marked: Bytes, length: int, out: Bytes, blocks: Ints) -> int:
        return _write_lines(marked, length, out, blocks) if key > 0 else -1

    return write_lines


write_lines = _entry(CACHE_KEY)


@numba.njit(nogil=True)
def is_wide_space(first: int, second: int, third: int) -> bool:
    """Return whether three bytes encode a space other than U+0020."""
    if first == 0xE3:
        return bool(second == 0x80 and third == 0x80)
    if first == 0xE2:
        thin = second == 0x80 and (third <= 0x8A or third == 0xA8 or third == 0xA9 or third == 0xAF)
        return bool(thin or (second == 0x81 and third == 0x9F))
    return bool(first == 0xE1 and second == 0x9A and third == 0x80)
