"""Spans of bytes that occur more than once in a corpus: the first stays, later ones are cut out on character borders.

A span of `min_bytes` holds, wherever it stands, the same winnowed fingerprint (Schleimer et al., "Winnowing", 2003):
of the hashes of every `min_bytes / 2` bytes, the smallest in each window. Fingerprints go to sorted runs on disk; equal
ones meet by ranges of hashes; and each meeting is verified by comparing the texts themselves, byte by byte to the left
and to the right, so that a hash decides nothing. In a group of equal fingerprints each is compared with the first and
with the one before it: a span that repeats only some other member of the group by more than the fingerprint is missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

UInt8Array = npt.NDArray[np.uint8]
UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]
Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class SubstringSettings:
    """Which repetitions are cut."""

    min_bytes: int = 200
    """Spans of at least so many bytes of UTF-8."""
    min_characters_left: int = 1
    """A document with fewer characters left is dropped."""

    def __post_init__(self) -> None:
        if self.min_bytes < 16:
            raise ValueError(f"min_bytes is {self.min_bytes}; it must be at least 16")


def as_bytes(text: str) -> UInt8Array:
    """A text's UTF-8."""
    return np.frombuffer(text.encode("utf-8", "replace"), np.uint8)


def fingerprints(content: UInt8Array, min_bytes: int) -> tuple[UInt64Array, Int64Array]:
    """(hash, place) of the winnowed fingerprints of a text."""
    width = min_bytes // 2
    if len(content) < min_bytes:
        return np.empty(0, np.uint64), np.empty(0, np.int64)
    return _winnow(content, width, min_bytes - width + 1)


def shared_span(later: UInt8Array, at: int, earlier: UInt8Array, other: int, same: bool) -> Span:
    """The longest span of `later` around a place that equals one of `earlier` around another.

    Where both are one text (`same`), a span ends before it reaches into what it repeats.
    """
    begin, end = _extend(later, at, earlier, other, same)
    return int(begin), int(end)


def cut(text: str, spans: Iterable[Span]) -> tuple[str, int]:
    """(the text without some spans of its bytes, bytes cut); half characters at the ends of a span stay whole.

    >>> cut("naïve café", [(3, 6)])
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
    # The places of possible minima in order, smallest hash in front; of equal ones the last, as in the paper.
    queue = np.empty(count, np.int64)
    front = back = 0
    places = np.empty(count, np.int64)
    found, last = 0, -1
    for at in range(count):
        while back > front and hashes[queue[back - 1]] >= hashes[at]:
            back -= 1
        queue[back] = at
        back += 1
        if queue[front] <= at - window:
            front += 1
        if at >= window - 1 and queue[front] != last:
            last = queue[front]
            places[found] = last
            found += 1
    places = places[:found].copy()
    return hashes[places], places


@numba.njit(cache=True, nogil=True)
def _extend(later: UInt8Array, at: int, earlier: UInt8Array, other: int, same: bool) -> tuple[int, int]:
    left = 0
    while left < at and left < other and later[at - left - 1] == earlier[other - left - 1]:
        left += 1
    right = 0
    most = min(later.size - at, earlier.size - other)
    if same:
        # The repeated span must not reach into the repetition: its end stays before our beginning.
        left = min(left, max(0, at - other))
        most = min(most, at - left - other)
    while right < most and later[at + right] == earlier[other + right]:
        right += 1
    return at - left, at + right
