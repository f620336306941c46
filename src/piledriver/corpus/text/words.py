"""Words of a text as hashes, in one compiled pass over its UTF-8 bytes.

Two rules, because the papers have two:

- `scan_words`: words between white space, for Gopher's rules and for near-duplicates. Scripts without spaces (Chinese,
  Japanese, Thai, Lao, Khmer, Burmese, Tibetan) have no such words: each of their characters is one.
- `scan_tokens`: words, numbers and single signs, as a linguistic tokenizer splits text, for FineWeb's rules and for the
  classifier, whose models depend on it.

Hashes are of lower case in ASCII. Compiled by numba on first use and cached.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

UInt8Array = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]
Int32Array = npt.NDArray[np.int32]

# Kinds of characters. LETTER and SIGN are also the kinds of words: with a letter, or without.
SPACE, SIGN, LETTER, DIGIT, UNSPACED = range(5)

_PRIME = np.uint64(0x100000001B3)
_BASIS = np.uint64(0xCBF29CE484222325)
_LOWER = np.array([byte + 32 if 65 <= byte <= 90 else byte for byte in range(256)], np.uint8)


def _ascii_kinds() -> UInt8Array:
    kinds = np.full(128, SIGN, np.uint8)
    for byte in range(128):
        character = chr(byte)
        kinds[byte] = (
            SPACE if character.isspace() else LETTER if character.isalpha() else DIGIT if character.isdigit() else SIGN
        )
    return kinds


_KINDS = _ascii_kinds()


def scan_words(text: str) -> tuple[UInt64Array, Int32Array, UInt8Array]:
    """Return (hash, characters, kind) of each word between white space.

    The kind is LETTER for a word with a letter, SIGN for one without, UNSPACED for a character of a script without
    spaces.

    >>> hashes, lengths, kinds = scan_words("It's 3.5 km, 東京。")
    >>> lengths.tolist(), kinds.tolist()
    ([4, 3, 3, 1, 1], [2, 1, 2, 4, 4])
    """
    content = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    # A word and its space, or a character of three bytes.
    most = content.size // 2 + 1
    hashes, lengths, kinds = np.empty(most, np.uint64), np.empty(most, np.int32), np.empty(most, np.uint8)
    count = _scan_words(content, _KINDS, _LOWER, hashes, lengths, kinds)
    return hashes[:count], lengths[:count], kinds[:count]


def scan_tokens(text: str) -> UInt64Array:
    """Return the hashes of words, numbers and signs.

    A token is a run of letters, digits, apostrophes and underscores, or any other visible character, or a Chinese,
    Japanese or Korean character.

    >>> len(scan_tokens("It's 3.5 km, naïve 東京"))
    9
    """
    content = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    hashes = np.empty(content.size, np.uint64)
    return hashes[: _scan_tokens(content, _KINDS, _LOWER, hashes)]


@numba.njit(cache=True, nogil=True)
def _wide_character(content: UInt8Array, at: int) -> tuple[int, int]:
    """Return (kind, bytes) of a character outside ASCII. Punctuation of scripts without spaces counts as a space."""
    first = content[at]
    second = content[at + 1] if at + 1 < content.size else np.uint8(0)
    third = content[at + 2] if at + 2 < content.size else np.uint8(0)
    if first < 0xE0:
        if first == 0xC2:
            # The upper half of Latin-1 up to U+00BF: spaces and signs but for three letters.
            if second in (0x85, 0xA0):
                return SPACE, 2
            return (LETTER if second in (0xAA, 0xB5, 0xBA) else SIGN), 2
        return LETTER, 2
    if first >= 0xF0:
        # Ideographs from U+20000 on; emoji; historic scripts and mathematical letters.
        return (UNSPACED if second >= 0xA0 else SIGN if second == 0x9F else LETTER), 4
    if first == 0xE2 and second <= 0xAF:
        # Punctuation, arrows, mathematical and other signs; spaces of all widths.
        if second == 0x80 and (third <= 0x8A or third in (0xA8, 0xA9, 0xAF)):
            return SPACE, 3
        return (SPACE if second == 0x81 and third == 0x9F else SIGN), 3
    if first == 0xE3 and second == 0x80:
        return SPACE, 3
    if first == 0xEF and second == 0xBC and (third <= 0x8F or 0x9A <= third <= 0xA0):
        return SPACE, 3
    if first == 0xE1 and second == 0x9A and third == 0x80:
        return SPACE, 3
    unspaced = (
        0xE3 <= first <= 0xE9  # kana and ideographs
        or (first == 0xE0 and second >= 0xB8)  # Thai, Lao, Tibetan
        or (first == 0xE1 and (second < 0x82 or (second == 0x82 and third < 0xA0)))  # Burmese
        or (first == 0xE1 and 0x9E <= second <= 0x9F)  # Khmer
        or (first == 0xE2 and second >= 0xBA)  # radicals
        or (first == 0xEA and second < 0x94)  # Yi
        or (first == 0xEF and (0xA4 <= second <= 0xAB or (second == 0xBD and third >= 0xA6) or second == 0xBE))
    )
    return (UNSPACED if unspaced else LETTER), 3


@numba.njit(cache=True, nogil=True)
def _scan_words(
    content: UInt8Array,
    ascii_kinds: UInt8Array,
    lower: UInt8Array,
    hashes: UInt64Array,
    lengths: Int32Array,
    kinds: UInt8Array,
) -> int:
    count = 0
    # Unsigned places: numba then does not test whether an index counts from the end.
    at, size, one = np.uint64(0), np.uint64(content.size), np.uint64(1)
    while at < size:
        hashed, begun, longer = _BASIS, at, np.uint64(0)
        letter = False
        kind, width = SPACE, 0
        while at < size:
            byte = content[at]
            if byte < 128:
                kind, width = ascii_kinds[byte], 1
                if kind == SPACE:
                    break
                hashed = (hashed ^ np.uint64(lower[byte])) * _PRIME
                letter |= kind == LETTER
                at += one
                continue
            kind, width = _wide_character(content, at)  # type: ignore[arg-type]
            if kind in (SPACE, UNSPACED):
                break
            for offset in range(at, at + np.uint64(width)):
                hashed = (hashed ^ np.uint64(content[offset])) * _PRIME
            letter |= kind == LETTER
            longer += np.uint64(width - 1)
            at += np.uint64(width)
        if at > begun:
            hashes[count] = hashed ^ (hashed >> np.uint64(32))
            lengths[count] = at - begun - longer
            kinds[count] = LETTER if letter else SIGN
            count += 1
        if at < size:
            if kind == UNSPACED:
                hashed = _BASIS
                for offset in range(at, at + np.uint64(width)):
                    hashed = (hashed ^ np.uint64(content[offset])) * _PRIME
                hashes[count] = hashed ^ (hashed >> np.uint64(32))
                lengths[count] = 1
                kinds[count] = UNSPACED
                count += 1
            at += np.uint64(width)
    return count


@numba.njit(cache=True, nogil=True)
def _token_character(content: UInt8Array, at: int, ascii_kinds: UInt8Array) -> tuple[int, int]:
    """Return (kind, bytes) of the character that begins here, by the rule of `scan_tokens`."""
    first = content[at]
    if first < 128:
        if first in (39, 95):  # apostrophe and underscore
            return LETTER, 1
        return (SPACE if first < 32 else ascii_kinds[first]), 1
    second = content[at + 1] if at + 1 < content.size else np.uint8(0)
    if first < 0xE0:
        if first == 0xC2:
            return (SPACE if second == 0xA0 else LETTER if second in (0xAA, 0xB5, 0xBA) else SIGN), 2
        return LETTER, 2
    if first >= 0xF0:
        return SIGN, 4
    if (first == 0xE2 and second <= 0xAF) or (first == 0xE3 and second == 0x80):
        return SIGN, 3
    return (UNSPACED if 0xE3 <= first <= 0xED else LETTER), 3


@numba.njit(cache=True, nogil=True)
def _scan_tokens(content: UInt8Array, ascii_kinds: UInt8Array, lower: UInt8Array, hashes: UInt64Array) -> int:
    count = at = 0
    while at < content.size:
        kind, width = _token_character(content, at, ascii_kinds)
        if kind == SPACE:
            at += width
            continue
        hashed = _BASIS
        while True:
            for offset in range(at, at + width):
                hashed = (hashed ^ np.uint64(lower[content[offset]])) * _PRIME
            at += width
            if at >= content.size or kind in (SIGN, UNSPACED):
                break
            kind, width = _token_character(content, at, ascii_kinds)
            if kind not in (LETTER, DIGIT):
                break
        hashes[count] = hashed ^ (hashed >> np.uint64(32))
        count += 1
    return count
