"""Exact substring deduplication: byte spans that occur more than once in a corpus; all but the first are cut.

The rule: take every window of `min_bytes` bytes inside a document. It is repeated if the same bytes occur earlier in
the corpus, without overlap. Every byte of a repeated window is cut, and no other, except that characters are never
split. (This is the rule of Lee et al., "Deduplicating Training Data Makes Language Models Better", 2021, which they
implement with a suffix array over the whole corpus.)

The method needs a fixed amount of memory. Of the hashes of every `min_bytes / 2` bytes, the smallest inside a window is
its fingerprint (Schleimer et al., "Winnowing", 2003): equal windows have equal fingerprints at equal places, and
neighbouring windows mostly share one, so there is one in some 50 bytes. Fingerprints are written to sorted runs and
compared by ranges of hashes; only windows whose fingerprint occurs elsewhere are hashed as a whole, by 125 bits, and
compared in the same way. So text that occurs once costs one fingerprint in 50 bytes, and repeated text 24 bytes of disk
for each byte.
"""

from __future__ import annotations

from collections.abc import Iterable

import numba
import numpy as np
import numpy.typing as npt

from piledriver.corpus.dedup.arrays import Int64Array, UInt8Array, UInt64Array

Span = tuple[int, int]

_MERSENNE = np.uint64((1 << 61) - 1)
_LOW = np.uint64(0xFFFFFFFF)


def utf8_array(text: str) -> UInt8Array:
    """Return the UTF-8 bytes of a text as an array."""
    return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)


def fingerprints(content: UInt8Array, min_bytes: int) -> tuple[UInt64Array, Int64Array]:
    """Return (hashes, places) of the fingerprints of a text."""
    hashes, chosen = _winnowed(content, min_bytes)
    places = chosen[np.flatnonzero(np.diff(chosen, prepend=-1))]
    return hashes[places], places


def hash_windows(content: UInt8Array, min_bytes: int, places: Int64Array) -> UInt64Array:
    """Return rows (hash, second hash, place) of the windows whose fingerprint is at one of some sorted places."""
    if not len(places):
        return np.empty((0, 3), np.uint64)
    _, chosen = _winnowed(content, min_bytes)
    at = np.minimum(np.searchsorted(places, chosen), len(places) - 1)
    return _hash_windows(content, min_bytes, places[at] == chosen)


def repeated_windows(rows: UInt64Array, min_bytes: int) -> UInt64Array:
    """Return the sorted places of the windows that occur earlier without overlap; `rows` are from `hash_windows`."""
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    new = np.ones(len(rows), np.bool_)
    new[1:] = (rows[1:, :2] != rows[:-1, :2]).any(axis=1)
    firsts = np.flatnonzero(new)
    first = rows[firsts[np.cumsum(new) - 1], 2] if len(rows) else rows[:, 2]
    # Places count through all documents, so windows at least a window apart do not overlap, in whatever documents.
    return np.sort(rows[rows[:, 2] >= first + np.uint64(min_bytes), 2])


def covered_spans(places: Iterable[int], min_bytes: int) -> list[Span]:
    """Return the spans that windows at sorted places cover.

    >>> covered_spans([3, 4, 30], 10)
    [(3, 14), (30, 40)]
    """
    spans: list[Span] = []
    for place in places:
        if spans and place <= spans[-1][1]:
            spans[-1] = (spans[-1][0], place + min_bytes)
        else:
            spans.append((place, place + min_bytes))
    return spans


def cut_spans(text: str, spans: Iterable[Span]) -> tuple[str, int]:
    """Return (the text without some spans of its bytes, bytes cut). A character only partly inside a span stays.

    >>> cut_spans("naïve café", [(3, 6)])
    ('naï café', 2)
    """
    content = text.encode("utf-8", "replace")
    kept, at, removed = [], 0, 0
    for begin, end in sorted(spans):
        begin = max(begin, at)
        while begin < end and begin < len(content) and content[begin] & 0xC0 == 0x80:
            begin += 1
        while end > begin and end < len(content) and content[end] & 0xC0 == 0x80:
            end -= 1
        if end > begin:
            kept.append(content[at:begin])
            removed += end - begin
            at = end
    kept.append(content[at:])
    return b"".join(kept).decode("utf-8"), removed


def _winnowed(content: UInt8Array, min_bytes: int) -> tuple[UInt64Array, Int64Array]:
    """Return (hash of every `min_bytes / 2` bytes, place of the smallest inside each window)."""
    if len(content) < min_bytes:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    width = min_bytes // 2
    return _winnow(content, width, min_bytes - width + 1)


@numba.njit(cache=True, nogil=True)
def _winnow(content: UInt8Array, width: int, window: int) -> tuple[UInt64Array, Int64Array]:
    base = np.uint64(0x9E3779B97F4A7C15)
    power = np.uint64(1)
    for _ in range(width):
        power *= base
    count = content.size - width + 1
    hashes = np.empty(count, np.uint64)
    rolling = np.uint64(0)
    for at in range(content.size):
        rolling = rolling * base + np.uint64(content[at]) + np.uint64(1)
        if at >= width:
            rolling -= power * (np.uint64(content[at - width]) + np.uint64(1))
        if at >= width - 1:
            mixed = (rolling ^ (rolling >> np.uint64(32))) * np.uint64(0xFF51AFD7ED558CCD)
            hashes[at - width + 1] = mixed ^ (mixed >> np.uint64(29))
    # Places of possible minima in order, smallest hash in front; among equal hashes the last, as in the paper.
    queue = np.empty(count, np.int64)
    front = back = 0
    chosen = np.empty(count - window + 1, np.int64)
    for at in range(count):
        while back > front and hashes[queue[back - 1]] >= hashes[at]:
            back -= 1
        queue[back] = at
        back += 1
        if queue[front] <= at - window:
            front += 1
        if at >= window - 1:
            chosen[at - window + 1] = queue[front]
    return hashes, chosen


@numba.njit(cache=True, nogil=True)
def _hash_windows(content: UInt8Array, width: int, wanted: npt.NDArray[np.bool_]) -> UInt64Array:
    """Return a row for each wanted window: rolling hashes modulo 2^64 and modulo 2^61 - 1, a prime, and its place."""
    base, prime_base = np.uint64(0xD6E8FEB86659FD93), np.uint64(0x1F3D5B79A2C4E68)
    power, prime_power = np.uint64(1), np.uint64(1)
    for _ in range(width):
        power *= base
        prime_power = _modulo_product(prime_power, prime_base)
    rows = np.empty((np.count_nonzero(wanted), 3), np.uint64)
    first = second = np.uint64(0)
    found = 0
    for at in range(content.size):
        byte = np.uint64(content[at]) + np.uint64(1)
        first = first * base + byte
        second = _modulo_product(second, prime_base) + byte
        if at >= width:
            gone = np.uint64(content[at - width]) + np.uint64(1)
            first -= power * gone
            second += _MERSENNE - _modulo_product(prime_power, gone)
        second = (second & _MERSENNE) + (second >> np.uint64(61))
        if second >= _MERSENNE:
            second -= _MERSENNE
        start = at - width + 1
        if start >= 0 and wanted[start]:
            mixed = (first ^ (first >> np.uint64(32))) * np.uint64(0xFF51AFD7ED558CCD)
            rows[found, 0] = mixed ^ (mixed >> np.uint64(29))
            rows[found, 1] = second
            rows[found, 2] = start
            found += 1
    return rows


@numba.njit(cache=True, nogil=True, inline="always")
def _modulo_product(one: np.uint64, two: np.uint64) -> np.uint64:
    """Multiply two numbers up to 2^61 modulo 2^61 - 1; the result is up to 2^61."""
    high_one, low_one = one >> np.uint64(32), one & _LOW
    high_two, low_two = two >> np.uint64(32), two & _LOW
    middle = high_one * low_two + low_one * high_two
    low = low_one * low_two
    # 2^64 is 8 and 2^61 is 1 modulo the prime; the middle stands for 2^32 times itself.
    total = (
        ((high_one * high_two) << np.uint64(3))
        + (middle >> np.uint64(29))
        + ((middle & np.uint64((1 << 29) - 1)) << np.uint64(32))
        + (low & _MERSENNE)
        + (low >> np.uint64(61))
    )
    total = (total & _MERSENNE) + (total >> np.uint64(61))
    return (total & _MERSENNE) + (total >> np.uint64(61))
