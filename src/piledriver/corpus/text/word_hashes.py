"""Words of a text as `corpus/text/words.py` defines them, without positions: hashes, lengths and kinds in one pass.

Half the time of `Words`. Most bytes are ASCII letters, digits and spaces; those are told by one table, and everything
else asks `character_at`.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from piledriver.corpus.text.words import BYTE_CLASSES, DIGIT, LEAD3, LETTER, PUNCTUATION, SPACE, character_at

UInt8Array = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]
Int32Array = npt.NDArray[np.int32]

# What a word is.
SIGN, NUMBER, ALPHABETIC = range(3)

_PRIME = np.uint64(0x100000001B3)
_BASIS = np.uint64(0xCBF29CE484222325)
_LOWER = np.array([byte + 32 if 65 <= byte <= 90 else byte for byte in range(256)], np.uint8)


def scan_words(text: str) -> tuple[UInt64Array, Int32Array, UInt8Array]:
    """(hash, characters, kind) of each word; the kind is SIGN, NUMBER (digits alone) or ALPHABETIC.

    >>> from piledriver.corpus.text.words import Words
    >>> text = "It's 3.5 km, naïve 東京"
    >>> hashes, lengths, kinds = scan_words(text)
    >>> (hashes == Words(text).hashes).all()
    np.True_
    >>> lengths.tolist(), kinds.tolist()
    ([4, 1, 1, 1, 2, 1, 5, 1, 1], [2, 1, 0, 1, 2, 0, 2, 2, 2])
    """
    content = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    hashes = np.empty(content.size, np.uint64)
    lengths, kinds = np.empty(content.size, np.int32), np.empty(content.size, np.uint8)
    count = _scan(content, BYTE_CLASSES, _LOWER, hashes, lengths, kinds)
    return hashes[:count], lengths[:count], kinds[:count]


@numba.njit(cache=True, nogil=True)
def _scan(
    content: UInt8Array,
    classes: UInt8Array,
    lower: UInt8Array,
    hashes: UInt64Array,
    lengths: Int32Array,
    kinds: UInt8Array,
) -> int:
    count = 0
    # Unsigned places: numba then does not ask whether an index counts from the end.
    at, size = np.uint64(0), np.uint64(content.size)
    while at < size:
        byte = content[at]
        kind = classes[byte]
        if kind == SPACE:
            at += np.uint64(1)
            continue
        hashed, begun = _BASIS, at
        longer = np.uint64(0)
        letter = False
        while kind != SPACE and kind != PUNCTUATION:
            if kind <= DIGIT:
                hashed = (hashed ^ np.uint64(lower[byte])) * _PRIME
                letter |= kind == LETTER
                at += np.uint64(1)
            else:
                real, width = character_at(content, at, classes)  # type: ignore[arg-type]
                if real != LETTER and real != DIGIT:
                    break
                letter = True
                end = min(at + np.uint64(width), size)
                for offset in range(at, end):
                    hashed = (hashed ^ np.uint64(content[offset])) * _PRIME
                longer += end - at - np.uint64(1)
                at = end
            if at >= size:
                break
            byte = content[at]
            kind = classes[byte]
        if at == begun:
            # A sign, or a character of a script without spaces: a word of its own. Or a space outside ASCII.
            real, width = character_at(content, at, classes)  # type: ignore[arg-type]
            end = min(at + np.uint64(width), size)
            if real != SPACE:
                for offset in range(at, end):
                    hashed = (hashed ^ np.uint64(content[offset])) * _PRIME
                hashes[count] = hashed ^ (hashed >> np.uint64(32))
                lengths[count] = 1
                kinds[count] = ALPHABETIC if real == LEAD3 else SIGN
                count += 1
            at = end
            continue
        hashes[count] = hashed ^ (hashed >> np.uint64(32))
        lengths[count] = at - begun - longer
        kinds[count] = ALPHABETIC if letter else NUMBER
        count += 1
    return count
