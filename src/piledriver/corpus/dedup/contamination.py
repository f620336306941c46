"""Evaluation text in training text: word n-grams (13 by default) that both contain, with their places.

Words are lower-cased and split at white space, as for GPT-3 and in The Pile's ablations. Places are characters of the
text as it stands (the original summed the lengths of words without the white space between them, so its cuts drifted).
N-grams are compared by 64-bit hashes: among 10^13 words and a million n-grams of evaluation text, less than one false
match is expected.
"""

from __future__ import annotations

from collections.abc import Iterable

import numba
import numpy as np

from piledriver.corpus.dedup.arrays import Int64Array, UInt32Array, UInt64Array, open_array

Span = tuple[int, int]


def hash_ngrams(text: str, words: int) -> tuple[UInt64Array, Int64Array, Int64Array]:
    """Return (hashes, first characters, ends) of all sequences of so many words.

    >>> hashes, starts, ends = hash_ngrams("One two  three", 2)
    >>> list(zip(starts.tolist(), ends.tolist()))
    [(0, 7), (4, 14)]
    >>> bool(hashes[0] == hash_ngrams("ONE\\nTWO", 2)[0][0])
    True
    """
    lowered = text.lower()
    if len(lowered) != len(text):
        # A few capitals have lower-case forms of two characters; leave them, so that places stay right.
        lowered = "".join(low if len(low := character.lower()) == 1 else character for character in text)
    points = np.frombuffer(lowered.encode("utf-32-le", "surrogatepass"), np.uint32)
    hashes, starts, ends = _split(points, _spaces())
    count = max(0, len(hashes) - words + 1)
    return _combine(hashes, words), starts[:count], ends[words - 1 :]


def index_ngrams(texts: Iterable[tuple[int, str]], words: int) -> tuple[UInt64Array, UInt32Array, int]:
    """Return (sorted hashes, the number of the text of each, texts too short to have any) of numbered texts."""
    hashes, owners, short = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)], 0
    for number, text in texts:
        found = hash_ngrams(text, words)[0]
        short += not len(found)
        hashes.append(found)
        owners.append(np.full(len(found), number, np.uint32))
    unique, first = np.unique(np.concatenate(hashes), return_index=True)
    return unique, np.concatenate(owners)[first], short


class NgramIndex:
    """The n-grams of evaluation texts, from an array folder with the `hashes` and `owners` of `index_ngrams`."""

    def __init__(self, folder: str, words: int) -> None:
        self._hashes, self._owners = (np.array(open_array(folder, name)) for name in ("hashes", "owners"))
        self._words = words

    def hits(self, text: str) -> tuple[list[Span], list[int]]:
        """Return (spans of characters, numbers of evaluation texts) that a text shares with the index."""
        hashes, starts, ends = hash_ngrams(text, self._words)
        if not len(hashes) or not len(self._hashes):
            return [], []
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        hit = np.flatnonzero(self._hashes[at] == hashes)
        return list(zip(starts[hit].tolist(), ends[hit].tolist(), strict=True)), np.unique(
            self._owners[at[hit]]
        ).tolist()


def pieces_around(size: int, hits: Iterable[Span], around: int, shortest: int) -> list[Span]:
    """Return the spans of a text that are left, and longer than `shortest`, when hits and their surroundings are cut.

    >>> pieces_around(1000, [(400, 450), (440, 500)], around=100, shortest=200)
    [(0, 300), (600, 1000)]
    """
    pieces, at = [], 0
    for start, end in [*sorted(hits), (size + around, size + around)]:
        if start - around - at > shortest:
            pieces.append((at, start - around))
        at = max(at, end + around)
    return pieces


def _spaces() -> UInt32Array:
    # Every character for which str.isspace() holds is below U+3001.
    return np.array([point for point in range(0x3001) if chr(point).isspace()], np.uint32)


@numba.njit(cache=True, nogil=True)
def _split(points: UInt32Array, spaces: UInt32Array) -> tuple[UInt64Array, Int64Array, Int64Array]:
    hashes = np.empty(points.size // 2 + 1, np.uint64)
    starts = np.empty(points.size // 2 + 1, np.int64)
    ends = np.empty(points.size // 2 + 1, np.int64)
    count, start = 0, -1
    hashed = np.uint64(0)
    for at in range(points.size + 1):
        space = True
        if at < points.size:
            point = points[at]
            space = point in (32, 10) or (
                (point < 32 or 0x85 <= point <= 0x3000)
                and spaces[min(np.searchsorted(spaces, point), spaces.size - 1)] == point
            )
        if space:
            if start >= 0:
                hashes[count] = hashed ^ (hashed >> np.uint64(32))
                starts[count], ends[count] = start, at
                count += 1
                start = -1
            continue
        if start < 0:
            start, hashed = at, np.uint64(0xCBF29CE484222325)
        hashed = (hashed ^ np.uint64(point)) * np.uint64(0x100000001B3)
    return hashes[:count], starts[:count], ends[:count]


@numba.njit(cache=True, nogil=True)
def _combine(words: UInt64Array, width: int) -> UInt64Array:
    count = max(0, words.size - width + 1)
    hashes = np.empty(count, np.uint64)
    for start in range(count):
        hashed = np.uint64(0x9E3779B97F4A7C15)
        for at in range(start, start + width):
            hashed = (hashed ^ words[at]) * np.uint64(0xFF51AFD7ED558CCD)
            hashed ^= hashed >> np.uint64(32)
        hashes[start] = hashed
    return hashes
