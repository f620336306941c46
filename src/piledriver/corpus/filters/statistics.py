"""Statistics that several filters need of the same text, computed once in compiled loops over its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numba
import numpy as np
import numpy.typing as npt

from piledriver.corpus.text.words import SIGN, UNSPACED, Int32Array, UInt64Array, scan_words


@dataclass(frozen=True)
class Statistics:
    """Word counts of one text."""

    hashes: UInt64Array
    lengths: Int32Array
    alphabetic_words: int
    """Words with at least one letter."""
    spaced_words: int
    """Words between white space, without the characters of scripts that have no spaces."""
    spaced_characters: int
    """Characters in these words."""

    @property
    def words(self) -> int:
        """The number of words."""
        return len(self.hashes)

    def count_present(self, hashes: UInt64Array) -> int:
        """Return how many of some words, given by their hashes, occur."""
        return int(_how_many(hashes, self.hashes))


@lru_cache(maxsize=2)
def statistics(text: str) -> Statistics:
    """Return the statistics of a text; the last few are cached, because filters run one after the other."""
    hashes, lengths, kinds = scan_words(text)
    alphabetic = len(kinds) - int((kinds == SIGN).sum())
    spaced = len(kinds) - int((kinds == UNSPACED).sum())
    # A character of a script without spaces has the length 1.
    return Statistics(hashes, lengths, alphabetic, spaced, int(lengths.sum()) - (len(kinds) - spaced))


def repetition(text: str, top: int, duplicate: int) -> tuple[list[float], list[float]]:
    """Return the shares of a text in the most frequent n-grams of 2, 3, ... words, and in repeated ones of 5, 6, ...

    All occurrences of the most frequent count. Repeated n-grams are found from the left: those that occur earlier
    count, without overlap.
    """
    counted = statistics(text)
    shares = np.zeros(top + duplicate)
    _repetition(counted.hashes, counted.lengths, top, shares)
    size = max(1, len(text))
    return (shares[:top] / size).tolist(), (shares[top:] / size).tolist()


def repeated(parts: Sequence[str]) -> tuple[int, int]:
    """Return (how many parts occur earlier, characters in those)."""
    if len(set(parts)) == len(parts):
        return 0, 0
    seen: set[str] = set()
    count = characters = 0
    for part in parts:
        if part in seen:
            count += 1
            characters += len(part)
        else:
            seen.add(part)
    return count, characters


@numba.njit(cache=True, nogil=True)
def _how_many(wanted: UInt64Array, hashes: UInt64Array) -> int:
    found = 0
    for one in wanted:
        for other in hashes:
            if one == other:
                found += 1
                break
    return found


@numba.njit(cache=True, nogil=True)
def _repetition(words: UInt64Array, lengths: Int32Array, top: int, shares: npt.NDArray[np.float64]) -> None:
    """Count the characters in the top n-grams (from 2 words), then in repeated ones (from 5), with open hash tables.

    A prefix of an n-gram that occurs twice occurs twice as well. So each width looks only at the places that the width
    before has left, which in most texts are few.
    """
    count = words.size
    bits = 4
    while (1 << bits) < 2 * count:
        bits += 1
    keys = np.empty(1 << bits, np.uint64)
    counts = np.empty(1 << bits, np.int32)
    slots = np.empty(count, np.int32)
    # The n-grams that may occur twice, by where they begin. At first, of one word: all.
    places = np.arange(count)
    left = count
    # Prefix sums: the hash and the length of any n-gram are two look-ups, whatever its width.
    base = np.uint64(0x9E3779B97F4A7C15)
    hashes = np.zeros(count + 1, np.uint64)
    characters_before = np.zeros(count + 1, np.int64)
    for word in range(count):
        hashes[word + 1] = hashes[word] * base + words[word]
        characters_before[word + 1] = characters_before[word] + lengths[word]
    power = base
    last_width = max(top + 1, shares.size - top + 4)
    for width in range(2, last_width + 1):
        power *= base
        # Those whose rest may occur twice too: the next place is there as well.
        kept = 0
        for i in range(left - 1):
            if places[i + 1] == places[i] + 1 and places[i] + width <= count:
                places[kept] = places[i]
                kept += 1
        left = kept
        if not left:
            return
        bits = 4
        while (1 << bits) < 2 * left:
            bits += 1
        mask = np.uint64((1 << bits) - 1)
        keys[: 1 << bits] = 0
        counts[: 1 << bits] = 0
        for i in range(left):
            at = places[i]
            hashed = hashes[at + width] - hashes[at] * power
            hashed = (hashed ^ (hashed >> np.uint64(32))) * np.uint64(0xFF51AFD7ED558CCD)
            hashed = (hashed ^ (hashed >> np.uint64(29))) | np.uint64(1)
            slot = (hashed >> np.uint64(7)) & mask
            while keys[slot] != 0 and keys[slot] != hashed:
                slot = (slot + np.uint64(1)) & mask
            keys[slot] = hashed
            counts[slot] += 1
            slots[i] = slot
        if width < top + 2:
            best = 0
            for i in range(left):
                times, at = counts[slots[i]], places[i]
                if times > 1:
                    # With the spaces between its words.
                    length = characters_before[at + width] - characters_before[at] + width - 1
                    best = max(best, times * length)
            shares[width - 2] = best
        kept = 0
        for i in range(left):
            if counts[slots[i]] > 1:
                places[kept] = places[i]
                slots[kept] = slots[i]
                kept += 1
        left = kept
        row = top + width - 5
        if width >= 5 and row < shares.size:
            passed, repeated_characters = 0, 0
            for i in range(left):
                if places[i] < passed:
                    continue
                if keys[slots[i]] == 0:
                    repeated_characters += characters_before[places[i] + width] - characters_before[places[i]]
                    passed = places[i] + width
                # Met: its next occurrence is a repetition.
                keys[slots[i]] = 0
            shares[row] = repeated_characters
