"""Plain HTML to text with marks in it, in one compiled pass over its bytes: the tags that posts, comments and chapters
are made of.

Words stay, white space is collapsed, and one byte stands where a tag meant something; `html_marks` makes lines of it.
Whatever it is not sure of it leaves to the tree, by giving up: other tags, tags that cross, names in capitals, hidden
text, odd entities, scripts that Unicode has no characters for. Compiled by numba on first use and cached; no compiler
is needed.
"""

# ruff: noqa: SIM109, SIM110, SIM114 (plain comparisons compile faster)
from __future__ import annotations

from html.entities import name2codepoint

import numba
import numpy as np
import numpy.typing as npt

from piledriver.corpus.html_marks import (
    BREAK,
    BULLET,
    DEEPEST,
    END,
    GAP,
    HEADING,
    HEADING_END,
    ITEM_END,
    LINE_GAP,
    LIST,
    LIST_END,
    NUMBER,
    QUOTE,
    QUOTE_END,
    RULE,
    VERBATIM,
    Bytes,
    Ints,
)

UInt64s = npt.NDArray[np.uint64]
GAVE_UP, HAS_CLASSES = -1, -2
_MEANINGLESS, _P, _BR, _HR, _IMG, _CODE, _PRE, _SUB, _SUP, _LI, _UL, _OL, _BLOCKQUOTE, _DIV, _FIGURE, _H = range(16)
_TAGS = {
    _MEANINGLESS: (
        "a abbr b big cite del dfn em font i ins kbd mark s samp small span strike strong tt u var"
    ),
    _P: "p", _BR: "br", _HR: "hr", _IMG: "img", _CODE: "code", _PRE: "pre", _SUB: "sub", _SUP: "sup", _LI: "li",
    _UL: "ul", _OL: "ol", _BLOCKQUOTE: "blockquote", _FIGURE: "figure", _H: "h1 h2 h3 h4 h5 h6",
    _DIV: "div section article main header footer aside figcaption center",
}  # fmt: skip


def _code_of(name: str) -> int:
    """The last eight letters of a name as a number."""
    return int.from_bytes(name.encode()[-8:], "big")


_NAMES = sorted((_code_of(name), kind) for kind, names in _TAGS.items() for name in names.split())
_TAG_CODES = np.array([code for code, _ in _NAMES], np.uint64)
_TAG_KINDS = np.array([kind for _, kind in _NAMES], np.int64)
_ENTITIES = sorted((_code_of(name), point) for name, point in name2codepoint.items())
_ENTITY_CODES = np.array([code for code, _ in _ENTITIES], np.uint64)
_ENTITY_POINTS = np.array([point for _, point in _ENTITIES], np.int64)
_NO_LANGUAGES = np.array(
    [_code_of(name) for name in ("default", "none", "source", "text", "plain", "code", "auto")], np.uint64
)
_CLASS, _STYLE, _HIDDEN, _START, _VALUE, _TYPE, _LANGUAGE, _OPEN_CODE, _CLOSE_CODE, _CLOSE_PRE = (
    np.frombuffer(word, np.uint8)
    for word in (
        *(b"class=", b"style=", b"hidden", b' start="', b' value="', b" type=", b' class="lang-'),
        *(b"<code>", b"</code>", b"</pre>"),
    )
)
_RAISED = np.array([0x2070, 0xB9, 0xB2, 0xB3, *range(0x2074, 0x207A)], np.int64)
_LT, _GT, _AMP, _SEMICOLON, _SLASH, _QUOTE_MARK, _APOSTROPHE = (ord(mark) for mark in "<>&;/\"'")
_SPACE, _NEWLINE, _BACKQUOTE = (ord(mark) for mark in " \n`")


# Places in the state: bytes marked so far, depth of code within a line and where it began, open tags, open lists,
# whether a paragraph is open.
_USED, _IN_CODE, _CODE_START, _OPENED, _LISTS, _IN_P = range(6)


@numba.njit(cache=True, nogil=True)
def scan(content: Bytes, classes_do_not_matter: bool) -> tuple[int, Bytes]:
    """(length, marked text) of markup, both UTF-8; a length below 0 is why there is no text.

    `classes_do_not_matter`: no class hides anything; without it the first one found ends the scan.
    """
    size = content.size
    # No mark is longer than its tag, but for a number at an item.
    out = np.empty(3 * size + 64, np.uint8)
    state = np.zeros(6, np.int64)
    opened = np.zeros((DEEPEST + 4, 2), np.uint64)
    # (kind of list, the number of its next item) of each open list.
    lists = np.zeros((DEEPEST + 4, 2), np.int64)
    leading = True
    classes = False
    at = 0
    while at < size:
        byte = content[at]
        if byte == _LT:
            closing = at + 1 < size and content[at + 1] == _SLASH
            begin = at + 2 if closing else at + 1
            name, end = _name(content, begin)
            place = _place(_TAG_CODES, name)
            stop, empty, classed = _attributes(content, end)
            if end == begin or place < 0 or stop < 0:
                return GAVE_UP, out
            kind = _TAG_KINDS[place]
            if classed:
                if not classes_do_not_matter:
                    return HAS_CLASSES, out
                if kind == _IMG:
                    return GAVE_UP, out
                classes = classes or kind != _PRE
            at = stop + 1
            if kind == _MEANINGLESS or kind == _IMG:
                continue
            if empty and kind != _BR and kind != _HR:
                return GAVE_UP, out
            if kind == _PRE:
                if closing or classes or not _may_hold_blocks(state, opened):
                    return GAVE_UP, out
                at = _preformatted(content, end, at, classed, state, out)
            elif kind == _SUB or kind == _SUP:
                at = -1 if closing else _script(content, at, kind, name, state, out)
            elif kind == _BR:
                out[state[_USED]] = BREAK
                state[_USED] += 1
            elif kind == _CODE:
                if not _code(closing, state, out):
                    return GAVE_UP, out
            else:
                if leading and state[_USED] > 0 and (kind == _DIV or kind == _FIGURE):
                    # Text at the very beginning is a paragraph of its own, which the tree knows.
                    return GAVE_UP, out
                leading = False
                if not _block(content, end, stop, kind, name, closing, state, out, lists, opened):
                    return GAVE_UP, out
            if at < 0:
                return GAVE_UP, out
        elif byte == _AMP:
            point, at = _entity(content, at)
            if at < 0:
                return GAVE_UP, out
            if point == 32 or point == 160:
                _space(state, out)
            else:
                state[_USED] = _put_point(out, state[_USED], point)
        elif byte >= 32:
            # Most of all bytes are those of words and the spaces between them, so a loop of their own.
            used = state[_USED]
            while byte >= 32 and byte != _LT and byte != _AMP and byte != 0xC2:
                if byte != _SPACE or (used > 0 and out[used - 1] > _SPACE):
                    out[used] = byte
                    used += 1
                at += 1
                if at == size:
                    break
                byte = content[at]
            state[_USED] = used
            if at + 1 < size and byte == 0xC2:
                if content[at + 1] == 0xA0:
                    _space(state, out)
                else:
                    out[used] = byte
                    out[used + 1] = content[at + 1]
                    state[_USED] += 2
                at += 2
            elif at + 1 == size and byte == 0xC2:
                return GAVE_UP, out
        elif byte == 9 or byte == 10 or byte == 12 or byte == 13:
            _space(state, out)
            at += 1
        else:
            return GAVE_UP, out
    return (GAVE_UP if state[_OPENED] > 0 or state[_IN_CODE] > 0 else state[_USED]), out


@numba.njit(cache=True, nogil=True)
def _space(state: Ints, out: Bytes) -> None:
    """A space, unless nothing or another one stands before it in the line."""
    used = state[_USED]
    if used > 0 and out[used - 1] > _SPACE:
        out[used] = _SPACE
        state[_USED] = used + 1


@numba.njit(cache=True, nogil=True)
def _name(content: Bytes, at: int) -> tuple[np.uint64, int]:
    """(the last letters of a name as a number, where it ends)."""
    code = np.uint64(0)
    while at < content.size:
        byte = content[at]
        if not (97 <= byte <= 122 or 48 <= byte <= 57):
            break
        code = (code << np.uint64(8)) | np.uint64(byte)
        at += 1
    return code, at


@numba.njit(cache=True, nogil=True)
def _place(codes: UInt64s, code: np.uint64) -> int:
    """Where in a sorted table something stands; -1 where it does not."""
    low, high = 0, codes.size
    while low < high:
        middle = (low + high) // 2
        if codes[middle] < code:
            low = middle + 1
        else:
            high = middle
    return low if low < codes.size and codes[low] == code else -1


@numba.njit(cache=True, nogil=True)
def _is(content: Bytes, at: int, word: Bytes) -> bool:
    if at + word.size > content.size:
        return False
    for place in range(word.size):
        if content[at + place] != word[place]:
            return False
    return True


@numba.njit(cache=True, nogil=True)
def _attributes(content: Bytes, at: int) -> tuple[int, bool, bool]:
    """(where the tag ends or -1, whether it closes itself, whether it has a class).

    Quotation marks in pairs, no bracket between them; what may hide the element, and names in capitals, are for the
    tree.
    """
    size = content.size
    if at >= size or not (content[at] == _GT or content[at] == _SLASH or content[at] <= 32):
        return -1, False, False
    quoted = classed = False
    while at < size:
        byte = content[at]
        if byte == _LT:
            return -1, False, False
        if byte == _GT:
            return (-1 if quoted else at), content[at - 1] == _SLASH, classed
        if byte == _QUOTE_MARK:
            quoted = not quoted
        elif not quoted and (byte == _APOSTROPHE or 65 <= byte <= 90):
            return -1, False, False
        elif byte == 104 and _is(content, at, _HIDDEN):
            return -1, False, False
        elif byte == 115 and _is(content, at, _STYLE):
            return -1, False, False
        elif byte == 99 and _is(content, at, _CLASS):
            classed = True
        at += 1
    return -1, False, False


@numba.njit(cache=True, nogil=True)
def _find(content: Bytes, start: int, end: int, word: Bytes) -> int:
    """Where behind a word one is, between two places; -1 where it is not."""
    for at in range(start, end - word.size):
        if _is(content, at, word):
            return at + word.size
    return -1


@numba.njit(cache=True, nogil=True)
def _entity(content: Bytes, at: int) -> tuple[int, int]:
    """(character, where the entity ends or -1)."""
    at += 1
    size = content.size
    if at >= size:
        return 0, -1
    point = 0
    if content[at] == 35:
        at += 1
        sixteen = at < size and content[at] == 120
        begin = at + 1 if sixteen else at
        at = begin
        while at < size and at - begin < 7:
            byte = content[at]
            if 48 <= byte <= 57:
                digit = byte - 48
            elif sixteen and 97 <= (byte | 32) <= 102:
                digit = (byte | 32) - 87
            else:
                break
            point = point * (16 if sixteen else 10) + digit
            at += 1
        if at == begin or point < 32 or 126 < point < 160 or 0xD7FF < point < 0xE000 or point > 0x10FFFF:
            return 0, -1
    else:
        code = np.uint64(0)
        begin = at
        while at < size and at - begin < 9:
            byte = content[at]
            if not (97 <= (byte | 32) <= 122 or 48 <= byte <= 57):
                break
            code = (code << np.uint64(8)) | np.uint64(byte)
            at += 1
        place = _place(_ENTITY_CODES, code)
        if at - begin > 8 or place < 0:
            return 0, -1
        point = _ENTITY_POINTS[place]
    if at >= size or content[at] != _SEMICOLON:
        return 0, -1
    return point, at + 1


@numba.njit(cache=True, nogil=True)
def _put_point(out: Bytes, at: int, point: int) -> int:
    """A character as UTF-8; returns where it ends. An entity is never shorter than its character."""
    if point < 0x80:
        out[at] = point
        return at + 1
    if point < 0x800:
        out[at] = 0xC0 | (point >> 6)
        out[at + 1] = 0x80 | (point & 63)
        return at + 2
    if point < 0x10000:
        out[at] = 0xE0 | (point >> 12)
        out[at + 1] = 0x80 | ((point >> 6) & 63)
        out[at + 2] = 0x80 | (point & 63)
        return at + 3
    out[at] = 0xF0 | (point >> 18)
    out[at + 1] = 0x80 | ((point >> 12) & 63)
    out[at + 2] = 0x80 | ((point >> 6) & 63)
    out[at + 3] = 0x80 | (point & 63)
    return at + 4


@numba.njit(cache=True, nogil=True)
def _may_hold_blocks(state: Ints, opened: UInt64s) -> bool:
    """Whether a block may begin here as far as we dare to say."""
    if state[_IN_CODE] > 0 or state[_OPENED] >= DEEPEST:
        return False
    kind = opened[state[_OPENED] - 1, 1] if state[_OPENED] > 0 else np.uint64(_DIV)
    return bool(kind == _LI or kind == _BLOCKQUOTE or kind == _DIV or kind == _FIGURE)


@numba.njit(cache=True, nogil=True)
def _block(
    content: Bytes, start: int, end: int, kind: int, name: np.uint64, closing: bool, state: Ints, out: Bytes,
    lists: Ints, opened: UInt64s,
) -> bool:  # fmt: skip
    """The mark of a block that begins or ends; `start` to `end` are its attributes. False where it does not fit."""
    if state[_IN_CODE] > 0:
        return False
    mark = 0
    if kind == _P or kind == _HR:
        if not _may_hold_blocks(state, opened) or (closing and kind == _HR):
            return False
        mark = GAP if kind == _P else RULE
        state[_IN_P] = kind == _P and not closing
    elif state[_IN_P] == 1:
        # Its end tag was left out: HTML ends it here, XML would not.
        if not closing and (kind == _DIV or kind == _FIGURE or (state[_LISTS] > 0 and (kind == _UL or kind == _OL))):
            return False
        out[state[_USED]] = GAP
        state[_USED] += 1
        state[_IN_P] = 0
    if mark == 0 and closing:
        if state[_OPENED] == 0 or opened[state[_OPENED] - 1, 0] != name:
            return False
        state[_OPENED] -= 1
        mark = LINE_GAP if kind == _DIV else GAP if kind == _FIGURE else ITEM_END if kind == _LI else HEADING_END
        if kind == _UL or kind == _OL:
            state[_LISTS] -= 1
            mark = LIST_END
        elif kind == _BLOCKQUOTE:
            mark = QUOTE_END
    elif mark == 0 and kind == _LI:
        return _item(content, start, end, name, state, out, lists, opened)
    elif mark == 0:
        if not _may_hold_blocks(state, opened):
            return False
        opened[state[_OPENED], 0] = name
        opened[state[_OPENED], 1] = kind
        state[_OPENED] += 1
        mark = LINE_GAP if kind == _DIV else GAP if kind == _FIGURE else QUOTE
        if kind == _H:
            mark = HEADING - 1 + int(name & np.uint64(15))
        elif kind == _UL or kind == _OL:
            mark = LIST
            number = 1
            if kind == _OL and end > start:
                number = _number_at(content, _find(content, start, end, _START), 1)
                if number < 0 or _find(content, start, end, _TYPE) >= 0:
                    return False
            lists[state[_LISTS], 0] = kind
            lists[state[_LISTS], 1] = number
            state[_LISTS] += 1
    used = state[_USED]
    out[used] = mark
    used += 1
    if mark == RULE:
        out[used] = out[used + 1] = out[used + 2] = 45
        out[used + 3] = END
        used += 4
    state[_USED] = used
    return True


@numba.njit(cache=True, nogil=True)
def _code(closing: bool, state: Ints, out: Bytes) -> bool:
    """Code within a line; inside other code it is more of the same. Empty code leaves no quotes behind."""
    state[_IN_CODE] += -1 if closing else 1
    depth = state[_IN_CODE]
    if depth == 1 and not closing:
        out[state[_USED]] = _BACKQUOTE
        state[_USED] += 1
        state[_CODE_START] = state[_USED]
    elif depth == 0:
        if state[_USED] == state[_CODE_START]:
            state[_USED] -= 1
        else:
            out[state[_USED]] = _BACKQUOTE
            state[_USED] += 1
    return bool(depth >= 0)


@numba.njit(cache=True, nogil=True)
def _number_at(content: Bytes, at: int, default: int) -> int:
    """The number in quotation marks that begins here; the default where nothing does, -1 where it is none."""
    if at < 0:
        return default
    number = 0
    begin = at
    while at < content.size and 48 <= content[at] <= 57 and at - begin < 9:
        number = number * 10 + content[at] - 48
        at += 1
    return number if 0 < at - begin < 9 and at < content.size and content[at] == _QUOTE_MARK else -1


@numba.njit(cache=True, nogil=True)
def _item(
    content: Bytes, start: int, end: int, name: np.uint64, state: Ints, out: Bytes, lists: Ints, opened: UInt64s
) -> bool:
    """An item of the innermost list; the end tag of the one before may have been left out."""
    kind = opened[state[_OPENED] - 1, 1] if state[_OPENED] > 0 else np.uint64(_P)
    used = state[_USED]
    if kind == _LI:
        out[used] = ITEM_END
        used += 1
    elif kind == _UL or kind == _OL:
        opened[state[_OPENED], 0] = name
        opened[state[_OPENED], 1] = _LI
        state[_OPENED] += 1
    else:
        return False
    place = state[_LISTS] - 1
    if lists[place, 0] == _UL:
        out[used] = BULLET
        state[_USED] = used + 1
        return True
    number = lists[place, 1]
    if end > start:
        number = _number_at(content, _find(content, start, end, _VALUE), number)
        if number < 0:
            return False
    lists[place, 1] = number + 1
    out[used] = NUMBER
    used += 1
    digits = 1
    while number >= 10**digits:
        digits += 1
    for digit in range(digits):
        out[used + digits - 1 - digit] = 48 + number % 10
        number //= 10
    out[used + digits] = 46
    out[used + digits + 1] = END
    state[_USED] = used + digits + 2
    return True


@numba.njit(cache=True, nogil=True)
def _script(content: Bytes, at: int, kind: int, name: np.uint64, state: Ints, out: Bytes) -> int:
    """Raised or lowered text without markup: digits by their own characters, small print as it is.

    Returns where the end tag ends, or -1 where it is for the tree to say how it is to be written.
    """
    begin = at
    while at < content.size and content[at] != _LT and content[at] != _AMP and content[at] < 0x80:
        at += 1
    closed, end = _name(content, at + 2)
    if not (at + 1 < content.size and content[at] == _LT and content[at + 1] == _SLASH):
        return -1
    if closed != name or end >= content.size or content[end] != _GT:
        return -1
    stop = at
    while stop > begin and content[stop - 1] <= _SPACE:
        stop -= 1
    while begin < stop and content[begin] <= _SPACE:
        begin += 1
    spaces = digits = 0
    for place in range(begin, stop):
        spaces += content[place] <= _SPACE
        digits += 48 <= content[place] <= 57
    used = state[_USED]
    if begin == stop or used == 0 or out[used - 1] <= _SPACE or spaces > 0:
        for place in range(begin, stop):
            if content[place] > _SPACE:
                out[state[_USED]] = content[place]
                state[_USED] += 1
            else:
                _space(state, out)
        return -1 if used > 0 and out[used - 1] == BREAK else end + 1
    if digits < stop - begin or digits > 40:
        return -1
    # A raised digit takes three bytes, which the buffer allows for every byte of the markup.
    for place in range(begin, stop):
        digit = content[place] - 48
        state[_USED] = _put_point(out, state[_USED], _RAISED[digit] if kind == _SUP else 0x2080 + digit)
    return end + 1


@numba.njit(cache=True, nogil=True)
def _preformatted(content: Bytes, start: int, at: int, classed: bool, state: Ints, out: Bytes) -> int:
    """A block of text as it is, in a fence where it is code; returns where its end tag ends, or -1."""
    state[_IN_P] = 0
    begun = used = state[_USED]
    out[used] = VERBATIM
    used += 1
    language = _find(content, start, at, _LANGUAGE) if classed else 0
    if language < 0:
        return -1
    code = _is(content, at, _OPEN_CODE)
    at += _OPEN_CODE.size if code else 0
    fence = code or language > 0
    if fence:
        out[used] = out[used + 1] = out[used + 2] = _BACKQUOTE
        used += 3
        if language > 0:
            used = _put_language(content, language, out, used)
            if used < 0:
                return -1
        out[used] = _NEWLINE
        used += 1
    body = used
    backquotes = 0
    size = content.size
    while at < size and content[at] != _LT:
        point = int(content[at])
        if point == _AMP:
            point, at = _entity(content, at)
            if at < 0:
                return -1
            used = _put_point(out, used, 32 if point == 160 else point)
        elif point == 0xC2 and at + 1 < size and content[at + 1] == 0xA0:
            out[used] = _SPACE
            used += 1
            at += 2
        elif point < 32 and point != _NEWLINE and point != 9:
            return -1
        else:
            at += 1
            if point != _NEWLINE or used > body:
                out[used] = point
                used += 1
        backquotes = backquotes + 1 if point == _BACKQUOTE else 0
        if backquotes > 2:
            return -1
    if code:
        if not _is(content, at, _CLOSE_CODE):
            return -1
        at += _CLOSE_CODE.size
        while at < size and (content[at] == _NEWLINE or content[at] == _SPACE):
            at += 1
    if not _is(content, at, _CLOSE_PRE):
        return -1
    while used > body and (out[used - 1] == _NEWLINE or out[used - 1] == _SPACE or out[used - 1] == 9):
        used -= 1
    if used == body:
        # Nothing was in it, but what stands before and behind is not one line.
        out[begun] = LINE_GAP
        state[_USED] = begun + 1
        return at + _CLOSE_PRE.size
    if fence:
        out[used] = _NEWLINE
        out[used + 1] = out[used + 2] = out[used + 3] = _BACKQUOTE
        used += 4
    out[used] = END
    state[_USED] = used + 1
    return at + _CLOSE_PRE.size


@numba.njit(cache=True, nogil=True)
def _put_language(content: Bytes, at: int, out: Bytes, used: int) -> int:
    """The language that a class names, in small letters; returns where it ends, or -1."""
    begin = at
    code = np.uint64(0)
    while at < content.size and content[at] != _QUOTE_MARK and content[at] != _SPACE:
        byte = content[at]
        if 65 <= byte <= 90:
            byte = byte + 32
        if not (97 <= byte <= 122 or 48 <= byte <= 57 or byte == 43 or byte == 35 or byte == 45):
            return -1
        code = (code << np.uint64(8)) | np.uint64(byte)
        out[used] = byte
        used += 1
        at += 1
    if at == begin or at - begin > 8:
        return -1
    for place in range(_NO_LANGUAGES.size):
        if _NO_LANGUAGES[place] == code:
            return used - (at - begin)
    return used
