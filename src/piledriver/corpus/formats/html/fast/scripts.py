"""Sub- and superscripts in a line, compiled: the rules of `formats/html/scripts.py`, for `scan.py`."""

from __future__ import annotations

import numba
import numpy as np

from piledriver.corpus.formats.html.fast.lines import BREAK, Bytes, is_wide_space
from piledriver.corpus.formats.html.fast.tables import code_of
from piledriver.corpus.formats.html.scripts import ORNAMENTAL

# Ordinal endings, titles and trade marks, where raising is only typography.
_ORNAMENTS = np.array(sorted(code_of(word) for word in ORNAMENTAL if word.isascii()), np.int64)
_SPACE = 32


@numba.njit(nogil=True)
def write_script(out: Bytes, start: int, end: int, raised: bool, linked: bool) -> int:
    """Rewrite the sub- or superscript at the end of `out`; return its new end, or -1 where the tree must decide."""
    while end > start and out[end - 1] == _SPACE:
        end -= 1
    size = end - start
    if size == 0:
        return -1
    spaces = wide = digits = signs = 0
    code = 0
    for place in range(start, end):
        byte = int(out[place])
        spaces += byte == _SPACE
        wide += byte >= 0x80
        digits += 48 <= byte <= 57
        # + - = ( ) and, raised, n.
        signs += byte == 43 or byte == 45 or byte == 61 or byte == 40 or byte == 41 or (raised and byte == 110)
        code = (code << 8) | (byte + 32 if 65 <= byte <= 90 else byte)
    if wide > 0 and size > 2:
        # The tree strips spaces of other widths at either end.
        if is_wide_space(out[start], out[start + 1], out[start + 2]):
            return -1
        if is_wide_space(out[end - 3], out[end - 2], out[end - 1]):
            return -1
    if spaces > 0:
        # Small print.
        return end
    before = out[start - 1]
    if wide > 0 or before == BREAK or (before >= 0x80 and is_wide_space(out[start - 3], out[start - 2], before)):
        return -1
    if linked and raised:
        # A footnote mark.
        if digits == size:
            for place in range(size):
                out[end - place] = out[end - 1 - place]
            out[start] = 91
            out[end + 1] = 93
            end += 2
        return end
    if before <= _SPACE or size > 40:
        return end
    if digits + signs == size:
        # At most three bytes a character, which the buffer allows for; backwards, so that none is overwritten.
        length = 0
        for place in range(start, end):
            length += 2 if raised and 49 <= out[place] <= 51 else 3
        at = start + length
        for place in range(size):
            byte = int(out[end - 1 - place])
            sign = 10 if byte == 43 else 11 if byte == 45 else 12 if byte == 61 else 13 if byte == 40 else 14
            digit = byte - 48 if 48 <= byte <= 57 else 15 if byte == 110 else sign
            if raised and 1 <= digit <= 3:
                at -= 2
                out[at] = 0xC2
                out[at + 1] = 0xB9 if digit == 1 else 0xB0 + digit
            else:
                at -= 3
                out[at] = 0xE2
                out[at + 1] = 0x81 if raised else 0x82
                out[at + 2] = 0xB0 + digit if raised else 0x80 + digit
        return start + length
    if raised:
        if size == 1 and before >= 0x80:
            return -1
        for place in range(_ORNAMENTS.size):
            if _ORNAMENTS[place] == code and size < 9 and (size > 1 or 48 <= before <= 57):
                return end
        first = out[start]
        if first == 91 or first == 42 or first == 35:
            return end
    if size > 12:
        return end
    extra = 1 if size == 1 else 2
    for place in range(size):
        out[end - 1 - place + extra] = out[end - 1 - place]
    out[start] = 94 if raised else 95
    if extra == 2:
        out[start + 1] = 123
        out[end + 2] = 125
    return end + (1 if size == 1 else 3)
