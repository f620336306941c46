"""Plain HTML to text with marker bytes: the compiled first half of the scanner, one pass over the bytes.

Words stay, white space is collapsed, and one byte stands for each tag that has a meaning; `lines.py` makes lines of it.
It covers the tags that posts, comments and chapters consist of and gives up on anything else: other tags, overlapping
tags, names in capitals, hidden text, classes that may hide text, unusual entities, exponents in other letters.

It is one long function on purpose: passing an array to a function counts a reference, which takes longer than reading a
tag, and numba compiles a function again inside each caller. Rare cases have functions of their own.
"""

# ruff: noqa: SIM109 (plain comparisons compile faster)
from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from piledriver.corpus.formats.html.fast.cache_key import CACHE_KEY
from piledriver.corpus.formats.html.fast.lines import (
    BREAK,
    BULLET,
    DEEPER,
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
from piledriver.corpus.formats.html.fast.scripts import write_script
from piledriver.corpus.formats.html.fast.tables import (
    ENTITIES,
    ENTITY_SLOTS,
    HINT_CODES,
    HINT_MASKS,
    NO_LANGUAGES,
    code_of,
    table,
)

GAVE_UP = -1
_MEANINGLESS, _P, _BR, _HR, _IMG, _CODE, _PRE, _SUB, _SUP, _LI, _UL, _OL, _BLOCKQUOTE, _DIV, _FIGURE, _H = range(16)
_TAGS = {
    _MEANINGLESS: (
        "a abbr acronym b bdi bdo big cite data del dfn em font i ins kbd label mark nobr s samp small span strike"
        " strong time tt u var wbr"
    ),
    _P: "p", _BR: "br", _HR: "hr", _IMG: "img", _CODE: "code", _PRE: "pre", _SUB: "sub", _SUP: "sup", _LI: "li",
    _UL: "ul", _OL: "ol", _BLOCKQUOTE: "blockquote", _FIGURE: "figure", _H: "h1 h2 h3 h4 h5 h6",
    _DIV: "div section article main header footer aside figcaption center",
}  # fmt: skip
_TAG_SLOTS = 131
_TAG_TABLE = table({code_of(name): kind for kind, names in _TAGS.items() for name in names.split()}, _TAG_SLOTS)
_A, _CODE_NAME, _PRE_NAME = (code_of(name) for name in ("a", "code", "pre"))
_HIDDEN, _STYLE, _CLASS = (code_of(word) for word in ("hidden", "style=", "class="))
_SIX_LETTERS = (1 << 48) - 1
_START, _VALUE, _TYPE, _LANGUAGE = (
    np.frombuffer(word, np.uint8) for word in (b' start="', b' value="', b" type=", b' class="lang-')
)
_LT, _GT, _AMP, _SEMICOLON, _SLASH, _QUOTE_MARK, _APOSTROPHE = (ord(mark) for mark in "<>&;/\"'")
_SPACE, _NEWLINE, _TAB, _BACKQUOTE = (ord(mark) for mark in " \n\t`")
# The kind of a byte: part of a word, white space, the first byte of a possible no-break space, anything else.
_WORD, _WHITE, _C2, _OTHER = range(4)
_BYTE_KINDS = np.array([_OTHER] * 32 + [_WORD] * 224, np.uint8)
_BYTE_KINDS[[9, 10, 12, 13, 32]] = _WHITE
_BYTE_KINDS[[_LT, _AMP]] = _OTHER
_BYTE_KINDS[0xC2] = _C2


@numba.njit(nogil=True)
def _scan(content: Bytes, out: Bytes, room: Ints) -> int:
    """Write marked text from the second byte of `out` on, both UTF-8, and return where it ends, or `GAVE_UP`.

    `room` holds (name, kind) of each open tag, then (kind, number of the next item) of each open list, `DEEPER` each.
    """
    size = content.size
    # A sentinel: nothing precedes the text.
    out[0] = 0
    used = 1
    depth = list_depth = code_depth = code_start = 0
    # Open `sub` and `sup`, two bits each; where the outermost began; the number of tags open in it.
    script = script_start = script_tags = 0
    linked = False
    in_paragraph = classes = in_verbatim = verbatim_code = fence = False
    verbatim_start = body = 0
    leading = True
    at = 0
    while at < size:
        byte = content[at]
        what = _BYTE_KINDS[byte]
        if what == _WORD:
            # Most bytes belong to words, so they get a loop of their own.
            while True:
                out[used] = byte
                used += 1
                at += 1
                if at == size:
                    break
                byte = content[at]
                if _BYTE_KINDS[byte] != _WORD:
                    break
            continue
        point = 0
        if what == _WHITE:
            at += 1
            point = _SPACE
            if in_verbatim:
                if byte == 12 or byte == 13:
                    return GAVE_UP
                if byte != _NEWLINE or used > body:
                    out[used] = byte
                    used += 1
                continue
        elif what == _C2:
            if at + 1 == size:
                return GAVE_UP
            if content[at + 1] != 0xA0:
                out[used] = byte
                out[used + 1] = content[at + 1]
                used += 2
                at += 2
                continue
            at += 2
            point = _SPACE
        elif byte == _AMP:
            at += 1
            begin = at
            code = 0
            if at < size and content[at] == 35:
                at += 1
                base = 16 if at < size and content[at] == 120 else 10
                begin = at + 1 if base == 16 else at
                at = begin
                while at < size and at - begin < 7:
                    digit = int(content[at]) - 48
                    if base == 16 and 97 <= (content[at] | 32) <= 102:
                        digit = (content[at] | 32) - 87
                    elif digit < 0 or digit > 9:
                        break
                    point = point * base + digit
                    at += 1
                if point < 32 or 126 < point < 160 or 0xD7FF < point < 0xE000 or point > 0x10FFFF:
                    return GAVE_UP
            else:
                while at < size and at - begin < 9:
                    letter = content[at]
                    if not (97 <= (letter | 32) <= 122 or 48 <= letter <= 57):
                        break
                    code = (code << 8) | letter
                    at += 1
                if at == begin or at - begin > 8:
                    return GAVE_UP
                slot = code % ENTITY_SLOTS
                while ENTITIES[slot, 0] != code and ENTITIES[slot, 0] != 0:
                    slot += 1
                point = ENTITIES[slot, 1]
            if at == begin or at >= size or content[at] != _SEMICOLON or point == 0:
                return GAVE_UP
            at += 1
            if point == 160:
                point = _SPACE
        elif byte != _LT:
            return GAVE_UP
        if point > 0:
            # A character as UTF-8, never longer than its entity. White space collapses to one space, none at a start.
            if point == _SPACE:
                if in_verbatim or (out[used - 1] > _SPACE and used != script_start):
                    out[used] = _SPACE
                    used += 1
            elif point < 0x80:
                out[used] = point
                used += 1
            else:
                if point < 0x800:
                    out[used] = 0xC0 | (point >> 6)
                    used += 1
                else:
                    if point < 0x10000:
                        out[used] = 0xE0 | (point >> 12)
                    else:
                        out[used] = 0xF0 | (point >> 18)
                        out[used + 1] = 0x80 | ((point >> 12) & 63)
                        used += 1
                    out[used + 1] = 0x80 | ((point >> 6) & 63)
                    used += 2
                out[used] = 0x80 | (point & 63)
                used += 1
            continue

        # A tag: its name, then its attributes. The tree reads names in capitals and attributes that may hide it.
        closing = at + 1 < size and content[at + 1] == _SLASH
        at += 2 if closing else 1
        begin = at
        name = 0
        while at < size:
            letter = content[at]
            if not (97 <= letter <= 122 or 48 <= letter <= 57):
                break
            name = (name << 8) | letter
            at += 1
        start = at
        slot = name % _TAG_SLOTS
        while _TAG_TABLE[slot, 0] != name and _TAG_TABLE[slot, 0] != 0:
            slot += 1
        kind = _TAG_TABLE[slot, 1]
        if begin == at or at >= size or _TAG_TABLE[slot, 0] == 0:
            return GAVE_UP
        if not (content[at] == _GT or content[at] == _SLASH or content[at] <= 32):
            return GAVE_UP
        classed = in_class = unsure = False
        code = 0
        while at < size and content[at] != _GT and content[at] != _LT:
            byte = content[at]
            at += 1
            if byte == _QUOTE_MARK:
                # A value; only that of a class matters. It may hold no angle bracket.
                while at < size and content[at] != _QUOTE_MARK and content[at] != _GT and content[at] != _LT:
                    if in_class:
                        code = (code << 8) | content[at]
                        for hint in range(HINT_CODES.size):
                            unsure = unsure or (code & HINT_MASKS[hint]) == HINT_CODES[hint]
                    at += 1
                if at == size or content[at] != _QUOTE_MARK:
                    return GAVE_UP
                at += 1
                code = 0
                in_class = False
                continue
            code = (code << 8) | byte
            six = code & _SIX_LETTERS
            if six == _CLASS:
                classed = in_class = True
            elif byte == _APOSTROPHE or 65 <= byte <= 90 or six == _HIDDEN or six == _STYLE or code & 0xFFFF == 0x203D:
                unsure = True
            elif in_class and byte > _SPACE:
                # The tree reads unquoted values.
                unsure = True
        if at == size or content[at] == _LT:
            return GAVE_UP
        stop = at
        empty = content[at - 1] == _SLASH
        at += 1
        if name == _A and not closing and stop > start and (unsure or classed):
            # An empty anchor, such as a page mark, has nothing to show or hide.
            if at + 3 < size and content[at] == _LT and content[at + 1] == _SLASH and content[at + 2] == 97:
                empty = empty or content[at + 3] == _GT
            if empty:
                linked = True
                continue
        if unsure:
            return GAVE_UP
        if classed:
            if kind == _IMG:
                return GAVE_UP
            classes = classes or kind != _PRE
        if in_verbatim:
            # Only its own end tag, preceded by that of the code in it.
            if not closing or stop != start or name != (_CODE_NAME if verbatim_code else _PRE_NAME):
                return GAVE_UP
            if verbatim_code:
                verbatim_code = False
                while at < size and (content[at] == _NEWLINE or content[at] == _SPACE):
                    at += 1
                if at == size or content[at] != _LT:
                    return GAVE_UP
                continue
            in_verbatim = False
            backquotes = 0
            for place in range(body, used):
                backquotes = backquotes + 1 if out[place] == _BACKQUOTE else 0
                if backquotes > 2:
                    return GAVE_UP
            while used > body and (out[used - 1] == _NEWLINE or out[used - 1] == _SPACE or out[used - 1] == _TAB):
                used -= 1
            if used == body:
                # An empty block still separates the lines before and after it.
                out[verbatim_start] = LINE_GAP
                used = verbatim_start + 1
                continue
            if fence:
                out[used] = _NEWLINE
                out[used + 1] = out[used + 2] = out[used + 3] = _BACKQUOTE
                used += 4
            out[used] = END
            used += 1
            continue
        if script > 0 and kind != _SUB and kind != _SUP:
            # Inside a sub- or superscript: only text, in elements that begin and end there.
            script_tags += -1 if closing else 1
            linked = linked or name == _A
            if script_tags < 0 or not (kind == _MEANINGLESS or kind == _CODE):
                return GAVE_UP
            continue
        if kind == _MEANINGLESS or kind == _IMG:
            continue
        if kind == _BR:
            out[used] = BREAK
            used += 1
            continue
        if empty and kind != _HR:
            return GAVE_UP
        if kind == _CODE:
            # Nested code continues the outer one; empty code leaves no backquotes.
            code_depth += -1 if closing else 1
            if code_depth < 0:
                return GAVE_UP
            if code_depth == 1 and not closing:
                out[used] = _BACKQUOTE
                used += 1
                code_start = used
            elif code_depth == 0:
                if used == code_start:
                    used -= 1
                else:
                    out[used] = _BACKQUOTE
                    used += 1
            continue
        if kind == _SUB or kind == _SUP:
            if not closing:
                if script == 0:
                    script_start = used
                    script_tags = 0
                    linked = False
                script = script << 2 | (1 if kind == _SUB else 2)
                if script >= 1 << 40:
                    return GAVE_UP
                continue
            if script & 3 != (1 if kind == _SUB else 2):
                return GAVE_UP
            script >>= 2
            if script == 0:
                used = write_script(out, int(script_start), int(used), kind == _SUP, bool(linked))
                script_start = 0
                if used < 0 or script_tags != 0:
                    return GAVE_UP
            continue

        # A block. Whether one may begin here:
        around = room[depth - 1, 1] if depth > 0 else _DIV
        fits = depth < DEEPEST and (around == _LI or around == _BLOCKQUOTE or around == _DIV or around == _FIGURE)
        if code_depth > 0:
            return GAVE_UP
        if kind == _PRE:
            if closing or classes or not fits:
                return GAVE_UP
            in_paragraph = False
            in_verbatim = True
            verbatim_start = used
            out[used] = VERBATIM
            used += 1
            language = _find(content, start, at, _LANGUAGE) if classed else 0
            verbatim_code = at + 6 <= size and content[at] == _LT and content[at + 5] == _GT
            for place in range(4):
                verbatim_code = verbatim_code and content[at + 1 + place] == (_CODE_NAME >> 8 * (3 - place)) & 255
            at += 6 if verbatim_code else 0
            fence = verbatim_code or language > 0
            if fence:
                out[used] = out[used + 1] = out[used + 2] = _BACKQUOTE
                used += 3
                if language > 0:
                    used = _put_language(content, language, out, used)
                if used < 0:
                    return GAVE_UP
                out[used] = _NEWLINE
                used += 1
            body = used
            if language < 0:
                return GAVE_UP
            continue
        if leading and used > 1 and (kind == _DIV or kind == _FIGURE):
            # The tree makes text at the very beginning a paragraph of its own.
            return GAVE_UP
        leading = False
        if kind == _P or kind == _HR:
            if not fits or (closing and kind == _HR):
                return GAVE_UP
            in_paragraph = kind == _P and not closing
            if kind == _P:
                out[used] = GAP
            else:
                out[used] = RULE
                out[used + 1] = out[used + 2] = out[used + 3] = 45
                out[used + 4] = END
                used += 4
            used += 1
            continue
        if in_paragraph:
            # An implied end tag: HTML closes the paragraph here, XML would not.
            if not closing and (kind == _DIV or kind == _FIGURE or (list_depth > 0 and (kind == _UL or kind == _OL))):
                return GAVE_UP
            out[used] = GAP
            used += 1
            in_paragraph = False
        if closing:
            if depth == 0 or room[depth - 1, 0] != name:
                return GAVE_UP
            depth -= 1
            mark = LINE_GAP if kind == _DIV else GAP if kind == _FIGURE else ITEM_END if kind == _LI else HEADING_END
            if kind == _UL or kind == _OL:
                list_depth -= 1
                mark = LIST_END
            elif kind == _BLOCKQUOTE:
                mark = QUOTE_END
            out[used] = mark
            used += 1
            continue
        if kind != _LI and not fits:
            return GAVE_UP
        if kind != _LI or around != _LI or depth == 0:
            room[depth, 0] = name
            room[depth, 1] = kind
            depth += 1
        if kind != _LI:
            mark = LINE_GAP if kind == _DIV else GAP if kind == _FIGURE else QUOTE
            if kind == _H:
                mark = HEADING - 1 + (name & 15)
            elif kind == _UL or kind == _OL:
                mark = LIST
                number = 1
                if kind == _OL and stop > start:
                    number = _number_at(content, _find(content, start, stop, _START), int(number))
                    if number < 0 or _find(content, start, stop, _TYPE) >= 0:
                        return GAVE_UP
                room[DEEPER + list_depth, 0] = kind
                room[DEEPER + list_depth, 1] = number
                list_depth += 1
            out[used] = mark
            used += 1
            continue
        # An item of the innermost list; the end tag of the previous item may be missing.
        if depth < 2 or not (around == _LI or around == _UL or around == _OL):
            return GAVE_UP
        if around == _LI:
            out[used] = ITEM_END
            used += 1
        number = room[DEEPER + list_depth - 1, 1]
        if room[DEEPER + list_depth - 1, 0] == _UL:
            out[used] = BULLET
            used += 1
            continue
        if stop > start:
            number = _number_at(content, _find(content, start, stop, _VALUE), int(number))
            if number < 0:
                return GAVE_UP
        room[DEEPER + list_depth - 1, 1] = number + 1
        out[used] = NUMBER
        digits = 1
        while number >= 10**digits:
            digits += 1
        for place in range(digits):
            out[used + digits - place] = 48 + number % 10
            number //= 10
        out[used + digits + 1] = 46
        out[used + digits + 2] = END
        used += digits + 3
    return GAVE_UP if depth > 0 or code_depth > 0 or script > 0 or in_verbatim else used


def _entry(key: int) -> Callable[[Bytes, Bytes, Ints], int]:
    @numba.njit(cache=True, nogil=True)
    def scan(content: Bytes, out: Bytes, room: Ints) -> int:
        return _scan(content, out, room) if key > 0 else GAVE_UP

    return scan


scan = _entry(CACHE_KEY)


@numba.njit(nogil=True)
def _find(content: Bytes, start: int, end: int, word: Bytes) -> int:
    """Return the position after the first occurrence of a word in a range, or -1."""
    for at in range(start, end - word.size):
        place = 0
        while place < word.size and content[at + place] == word[place]:
            place += 1
        if place == word.size:
            return at + place
    return -1


@numba.njit(nogil=True)
def _number_at(content: Bytes, at: int, default: int) -> int:
    """Return the quoted number that starts at `at`; the default where `at` is negative, -1 where it is not a number."""
    if at < 0:
        return default
    number = 0
    begin = at
    while at < content.size and 48 <= content[at] <= 57 and at - begin < 9:
        number = number * 10 + content[at] - 48
        at += 1
    return number if 0 < at - begin < 9 and at < content.size and content[at] == _QUOTE_MARK else -1


@numba.njit(nogil=True)
def _put_language(content: Bytes, at: int, out: Bytes, used: int) -> int:
    """Write the language that a class names in lower case and return where it ends, or -1."""
    begin = at
    code = 0
    while at < content.size and content[at] != _QUOTE_MARK and content[at] != _SPACE:
        byte = content[at]
        if 65 <= byte <= 90:
            byte = byte + 32
        if not (97 <= byte <= 122 or 48 <= byte <= 57 or byte == 43 or byte == 35 or byte == 45):
            return -1
        code = (code << 8) | byte
        out[used] = byte
        used += 1
        at += 1
    if at == begin or at - begin > 8:
        return -1
    for place in range(NO_LANGUAGES.size):
        if NO_LANGUAGES[place] == code:
            return used - (at - begin)
    return used
