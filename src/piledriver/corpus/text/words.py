"""Words of a text as hashes, in one native pass over its UTF-8 bytes: what filters count and what near-duplicates
share.

A word is a run of letters, digits, apostrophes and underscores; any other visible character is a word of its own, and
so is each Chinese, Japanese or Korean character, because those scripts put no spaces. Letters outside ASCII are taken
as they are. Compiled by numba on first use and cached; no compiler is needed.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
Int32Array = npt.NDArray[np.int32]

# What a byte of UTF-8 is. Continuation bytes go with the byte before them.
SPACE, LETTER, DIGIT, PUNCTUATION, CONTINUATION, LEAD2, LEAD3, LEAD4 = range(8)


def _byte_classes() -> UInt8Array:
    classes = np.full(256, PUNCTUATION, np.uint8)
    for byte in range(256):
        character = chr(byte)
        if byte >= 0xF0:
            classes[byte] = LEAD4
        elif byte >= 0xE0:
            classes[byte] = LEAD3
        elif byte >= 0xC0:
            classes[byte] = LEAD2
        elif byte >= 0x80:
            classes[byte] = CONTINUATION
        elif character.isspace() or byte < 32:
            classes[byte] = SPACE
        elif character.isalpha() or character in "_'":
            classes[byte] = LETTER
        elif character.isdigit():
            classes[byte] = DIGIT
    return classes


BYTE_CLASSES = _byte_classes()
_PRIME = np.uint64(0x100000001B3)
_BASIS = np.uint64(0xCBF29CE484222325)


@numba.njit(cache=True, nogil=True)
def character_at(content: UInt8Array, at: int, classes: UInt8Array) -> tuple[int, int]:
    """(class, bytes) of the character that begins here: SPACE, LETTER, DIGIT, PUNCTUATION, or LEAD3 for CJK."""
    kind = classes[content[at]]
    if kind <= PUNCTUATION:
        return kind, 1
    if kind == LEAD2:
        # U+00A0 is a space; the rest of Latin-1's upper half below U+00C0 is signs.
        if content[at] == 0xC2:
            second = content[at + 1] if at + 1 < content.size else 0
            return (SPACE if second == 0xA0 else LETTER if second in (0xAA, 0xB5, 0xBA) else PUNCTUATION), 2
        return LETTER, 2
    if kind == LEAD3:
        first = content[at]
        second = content[at + 1] if at + 1 < content.size else 0
        if first == 0xE2 and 0x80 <= second <= 0xAF:
            # General punctuation, arrows, mathematical and box drawing signs; U+2028 and thin spaces are rare enough.
            return PUNCTUATION, 3
        if first == 0xE3 and second == 0x80:
            return PUNCTUATION, 3
        if 0xE3 <= first <= 0xED:
            return LEAD3, 3
        return LETTER, 3
    if kind == LEAD4:
        return PUNCTUATION, 4
    return LETTER, 1


@numba.njit(cache=True, nogil=True)
def _split(content: UInt8Array, classes: UInt8Array, hashes: UInt64Array, starts: Int32Array, ends: Int32Array) -> int:
    """Fill hash (of the lower case in ASCII), first byte and end of each word; returns how many there are."""
    count = 0
    at = 0
    size = content.size
    while at < size:
        kind, width = character_at(content, at, classes)
        if kind == SPACE:
            at += width
            continue
        start = at
        hashed = _BASIS
        while True:
            for offset in range(at, min(at + width, size)):
                byte = content[offset]
                if 65 <= byte <= 90:
                    byte += np.uint8(32)
                hashed = (hashed ^ np.uint64(byte)) * _PRIME
            at += width
            if at >= size or kind in (PUNCTUATION, LEAD3):
                break
            kind, width = character_at(content, at, classes)
            if kind not in (LETTER, DIGIT):
                break
        hashes[count] = hashed ^ (hashed >> np.uint64(32))
        starts[count] = start
        ends[count] = min(at, size)
        count += 1
    return count


class Words:
    """The words of one text: `hashes`, and where each begins and ends in the UTF-8 `content`."""

    __slots__ = ("content", "ends", "hashes", "starts")

    def __init__(self, text: str) -> None:
        self.content: UInt8Array = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        most = self.content.size
        hashes, starts, ends = np.empty(most, np.uint64), np.empty(most, np.int32), np.empty(most, np.int32)
        count = _split(self.content, BYTE_CLASSES, hashes, starts, ends)
        self.hashes: UInt64Array = hashes[:count]
        self.starts: Int32Array = starts[:count]
        self.ends: Int32Array = ends[:count]

    def __len__(self) -> int:
        return len(self.hashes)
