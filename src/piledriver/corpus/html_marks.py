"""The second half of reading plain HTML: text with marks in it to lines, compiled.

`html_scan` takes the markup away and leaves, between the words, one byte for whatever means something; here that
becomes paragraphs, lists, quotations and headings. What each step means is said in `html_text`, which does the same for
a tree. (The two halves do not call each other: numba's cache would not notice a change in the other file.)
"""

# ruff: noqa: SIM109 (plain comparisons compile faster)
from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

BREAK, LINE_GAP, GAP, QUOTE, QUOTE_END, LIST, LIST_END, BULLET = range(1, 9)
ITEM_END, NUMBER, HEADING_END, RULE, VERBATIM, END = range(14, 20)
HEADING = 20
"""A heading of the first level; the bytes that follow are those of the other levels."""
DEEPEST = 60

_MOST_PREFIXES = 12
_SPACE, _NEWLINE, _TAB, _HASH, _HYPHEN, _GREATER = (ord(mark) for mark in " \n\t#->")
# Places in the state.
_WRITTEN, _NEEDED, _QUOTES, _PREFIXES, _PENDING, _FAILED = range(6)
# Columns of an open block: whether it is a quotation, its mark (from, to), whether no line has carried that yet.
_IS_QUOTE, _FROM, _TO, _IS_PENDING = range(4)
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


@numba.njit(cache=True, nogil=True)
def written(marked: Bytes, length: int) -> tuple[int, Bytes]:
    """(length, text) of marked text; a length of -1 where a heading is more than a line of words."""
    out = np.empty(3 * length + 1024, np.uint8)
    state = np.zeros(6, np.int64)
    blocks = np.zeros((DEEPEST + 4, 4), np.int64)
    fresh = np.zeros(DEEPEST + 4, np.int64)
    lists = 0
    heading = 0
    at = 0
    while at <= length:
        begin = at
        breaks = False
        while at < length and (marked[at] >= _SPACE or marked[at] == BREAK):
            breaks = breaks or marked[at] == BREAK
            at += 1
        start, end = _trimmed(marked, begin, at)
        if start < end:
            if heading > 0 and (breaks or _may_end_in_a_link(marked, start, end)):
                return -1, out
            _put_lines(state, out, blocks, marked, start, end, heading, BREAK if breaks else -1)
            heading = 0
        mark = marked[at] if at < length else END
        at += 1
        if mark == GAP or mark == LINE_GAP:
            _need(state, 2 if mark == GAP else 1)
        elif mark == QUOTE:
            _need(state, 2)
            _push(state, blocks, 1, 0, 0)
        elif mark == QUOTE_END or mark == ITEM_END:
            _pop(state, blocks)
            _need(state, 2 if mark == QUOTE_END else 1)
        elif mark == LIST:
            _need(state, 1 if lists > 0 else 2)
            fresh[lists] = 1
            lists += 1
        elif mark == LIST_END:
            lists -= 1
            _need(state, 1 if lists > 0 else 2)
        elif mark == BULLET or mark == NUMBER:
            if state[_WRITTEN] > 0 and not (state[_NEEDED] == 2 and fresh[lists - 1] == 1):
                state[_NEEDED] = 1
            state[_NEEDED] = max(state[_NEEDED], 1)
            fresh[lists - 1] = 0
            begin = at
            while mark == NUMBER and marked[at] != END:
                at += 1
            _push(state, blocks, 0, begin, at)
            at += 1 if mark == NUMBER else 0
        elif mark == RULE or mark == VERBATIM:
            begin = at
            while marked[at] != END:
                at += 1
            _need(state, 2)
            _put_lines(state, out, blocks, marked, begin, at, 0, _NEWLINE)
            _need(state, 2)
            at += 1
        elif mark == HEADING_END:
            heading = 0
            _need(state, 2)
        elif mark >= HEADING:
            _need(state, 2)
            heading = mark - HEADING + 1
        if state[_FAILED] == 1:
            return -1, out
    return state[_WRITTEN], out


@numba.njit(cache=True, nogil=True)
def _need(state: Ints, gap: int) -> None:
    """At least so many line breaks before the next line; the first line of an item stays beside its mark."""
    if state[_PENDING] == 0 and gap > state[_NEEDED]:
        state[_NEEDED] = gap


@numba.njit(cache=True, nogil=True)
def _push(state: Ints, blocks: Ints, is_quote: int, begin: int, end: int) -> None:
    """What stands before every line from now on."""
    place = state[_PREFIXES]
    blocks[place, _IS_QUOTE] = is_quote
    blocks[place, _FROM] = begin
    blocks[place, _TO] = end
    blocks[place, _IS_PENDING] = 1
    state[_PREFIXES] += 1
    state[_PENDING] += 1


@numba.njit(cache=True, nogil=True)
def _pop(state: Ints, blocks: Ints) -> None:
    state[_PREFIXES] -= 1
    state[_PENDING] -= blocks[state[_PREFIXES], _IS_PENDING]


@numba.njit(cache=True, nogil=True)
def _is_wide_space(text: Bytes, at: int) -> bool:
    """Whether three bytes are a space of another width than the usual one."""
    first, second, third = text[at], text[at + 1], text[at + 2]
    if first == 0xE3:
        return bool(second == 0x80 and third == 0x80)
    if first == 0xE2:
        thin = second == 0x80 and (third <= 0x8A or third == 0xA8 or third == 0xA9 or third == 0xAF)
        return bool(thin or (second == 0x81 and third == 0x9F))
    return bool(first == 0xE1 and second == 0x9A and third == 0x80)


@numba.njit(cache=True, nogil=True)
def _trimmed(text: Bytes, start: int, end: int) -> tuple[int, int]:
    """Without white space and line breaks at both ends."""
    while start < end:
        if text[start] == _SPACE or text[start] == BREAK:
            start += 1
        elif end - start > 2 and text[start] > 0xE0 and _is_wide_space(text, start):
            start += 3
        else:
            break
    while start < end:
        if text[end - 1] == _SPACE or text[end - 1] == BREAK:
            end -= 1
        elif end - start > 2 and text[end - 1] > 0x7F and _is_wide_space(text, end - 3):
            end -= 3
        else:
            break
    return start, end


@numba.njit(cache=True, nogil=True)
def _may_end_in_a_link(text: Bytes, start: int, end: int) -> bool:
    """Whether the last character of a heading may be the link to it that programs put there."""
    last = text[end - 1]
    before = text[end - 2] if end - start > 1 else _SPACE
    sign = before == 0xC2 and (last == 0xB6 or last == 0xA7)
    return bool(last == _HASH or sign or (last == 0x97 and before == 0x94))


@numba.njit(cache=True, nogil=True)
def _put_lines(
    state: Ints, out: Bytes, blocks: Ints, text: Bytes, start: int, end: int, heading: int, divider: int
) -> None:
    """Lines below all that was written, cut at `divider`; breaks that follow each other leave one blank line."""
    quotes = 0
    for place in range(state[_PREFIXES]):
        quotes += blocks[place, _IS_QUOTE]
    if state[_WRITTEN] > 0 and state[_NEEDED] > 1:
        if state[_WRITTEN] + 2 * DEEPEST > out.size:
            state[_FAILED] = 1
            return
        out[state[_WRITTEN]] = _NEWLINE
        state[_WRITTEN] += 1
        for place in range(min(quotes, state[_QUOTES])):
            if place > 0:
                out[state[_WRITTEN]] = _SPACE
                state[_WRITTEN] += 1
            out[state[_WRITTEN]] = _GREATER
            state[_WRITTEN] += 1
    state[_NEEDED] = 1
    state[_QUOTES] = quotes
    begin = start
    blank = False
    for place in range(start, end + 1):
        if place < end and (divider < 0 or text[place] != divider):
            continue
        first, last = begin, place
        begin = place + 1
        if divider == BREAK:
            first, last = _trimmed(text, first, last)
            if first == last:
                blank = True
                continue
        if blank:
            _put_line(state, out, blocks, text, first, first, 0)
            blank = False
        _put_line(state, out, blocks, text, first, last, heading)


@numba.njit(cache=True, nogil=True)
def _put_line(state: Ints, out: Bytes, blocks: Ints, text: Bytes, start: int, end: int, heading: int) -> None:
    """One line behind the marks of the blocks that it stands in; each mark is shown once, then it is only space."""
    prefixes = min(state[_PREFIXES], _MOST_PREFIXES)
    at = state[_WRITTEN]
    if at + (end - start) + 16 * _MOST_PREFIXES + 16 > out.size:
        state[_FAILED] = 1
        return
    if at > 0:
        out[at] = _NEWLINE
        at += 1
    begun = at
    for place in range(prefixes):
        if blocks[place, _IS_QUOTE] == 1:
            out[at] = _GREATER
        else:
            pending = blocks[place, _IS_PENDING] == 1
            begin, stop = blocks[place, _FROM], blocks[place, _TO]
            if begin == stop:
                out[at] = _HYPHEN if pending else _SPACE
            for digit in range(begin, stop):
                out[at] = text[digit] if pending else _SPACE
                at += 1
            at -= 1 if begin < stop else 0
        out[at + 1] = _SPACE
        at += 2
    if heading > 0:
        for _ in range(heading):
            out[at] = _HASH
            at += 1
        out[at] = _SPACE
        at += 1
    for place in range(start, end):
        out[at] = text[place]
        at += 1
    if state[_PREFIXES] > 0:
        while at > begun and (out[at - 1] == _SPACE or out[at - 1] == _TAB):
            at -= 1
        for place in range(state[_PREFIXES]):
            blocks[place, _IS_PENDING] = 0
        state[_PENDING] = 0
    state[_WRITTEN] = at
