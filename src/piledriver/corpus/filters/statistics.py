"""The figures that several filters ask of the same text, counted once, in native passes over its words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numba
import numpy as np
import numpy.typing as npt

from piledriver.corpus.words import (
    BYTE_CLASSES,
    CONTINUATION,
    DIGIT,
    LEAD3,
    LETTER,
    Int32Array,
    UInt8Array,
    UInt64Array,
    Words,
    character_at,
)


@dataclass(frozen=True)
class Statistics:
    """Counts of one text's words."""

    words: int
    """All words, signs included."""
    lexical_words: int
    """Words that are more than a sign."""
    lexical_characters: int
    """Characters in those."""
    alphabetic_words: int
    """Words with a letter."""
    hashes: UInt64Array

    def how_many_of(self, hashes: UInt64Array) -> int:
        """How many of some words, by their hashes, occur."""
        return int(_how_many(hashes, self.hashes))


@lru_cache(maxsize=2)
def _words(text: str) -> Words:
    return Words(text)


@lru_cache(maxsize=2)
def statistics(text: str) -> Statistics:
    """Count a text; the last few are remembered, because filters come one after the other."""
    words = _words(text)
    lexical, characters, alphabetic = _count(words.content, words.starts, words.ends, BYTE_CLASSES)
    return Statistics(len(words), lexical, characters, alphabetic, words.hashes)


def repetition(text: str, top: int, duplicate: int) -> tuple[list[float], list[float]]:
    """Shares of the text in the most frequent n-grams of 2, 3, ... words, and in repeated ones of 5, 6, ... words."""
    words = _words(text)
    shares = np.zeros(top + duplicate)
    _repetition(words.hashes, _lengths(words.content, words.starts, words.ends), top, shares)
    size = max(1, len(text))
    return (shares[:top] / size).tolist(), (shares[top:] / size).tolist()


def repeated(parts: Sequence[str]) -> tuple[int, int]:
    """(how many parts occurred before, characters in those)."""
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
def _count(content: UInt8Array, starts: Int32Array, ends: Int32Array, classes: UInt8Array) -> tuple[int, int, int]:
    lexical = characters = alphabetic = 0
    for word in range(starts.size):
        kind, _ = character_at(content, starts[word], classes)
        if kind not in (LETTER, DIGIT, LEAD3):
            continue
        lexical += 1
        letter = kind != DIGIT
        for at in range(starts[word], ends[word]):
            characters += classes[content[at]] != CONTINUATION
            letter = letter or classes[content[at]] == LETTER or classes[content[at]] > CONTINUATION
        alphabetic += letter
    return lexical, characters, alphabetic


@numba.njit(cache=True, nogil=True)
def _lengths(content: UInt8Array, starts: Int32Array, ends: Int32Array) -> Int32Array:
    lengths = np.zeros(starts.size, np.int32)
    for word in range(starts.size):
        for at in range(starts[word], ends[word]):
            lengths[word] += (content[at] & 0xC0) != 0x80
    return lengths


@numba.njit(cache=True, nogil=True)
def _repetition(words: UInt64Array, lengths: Int32Array, top: int, shares: npt.NDArray[np.float64]) -> None:
    """Fill the characters in the top n-grams (from 2 words), then in repeated ones (from 5), by open hash tables."""
    count = words.size
    bits = 4
    while (1 << bits) < 2 * count:
        bits += 1
    mask = np.uint64((1 << bits) - 1)
    keys = np.zeros(1 << bits, np.uint64)
    counts = np.zeros(1 << bits, np.int32)
    # Prefix sums: the hash and the length of any n-gram are two look-ups, whatever its width.
    base = np.uint64(0x9E3779B97F4A7C15)
    hashes = np.zeros(count + 1, np.uint64)
    characters_before = np.zeros(count + 1, np.int64)
    for word in range(count):
        hashes[word + 1] = hashes[word] * base + words[word]
        characters_before[word + 1] = characters_before[word] + lengths[word]
    for row in range(shares.size):
        is_top = row < top
        width = row + 2 if is_top else row - top + 5
        power = np.uint64(1)
        for _ in range(width):
            power *= base
        keys[:] = 0
        counts[:] = 0
        best = 0
        at = 0
        while at + width <= count:
            hashed = hashes[at + width] - hashes[at] * power
            hashed = (hashed ^ (hashed >> np.uint64(32))) * np.uint64(0xFF51AFD7ED558CCD)
            hashed ^= hashed >> np.uint64(29)
            characters = characters_before[at + width] - characters_before[at]
            hashed |= np.uint64(1)
            slot = (hashed >> np.uint64(7)) & mask
            while keys[slot] != 0 and keys[slot] != hashed:
                slot = (slot + np.uint64(1)) & mask
            known = keys[slot] == hashed
            keys[slot] = hashed
            counts[slot] += 1
            if is_top:
                if counts[slot] > 1 and counts[slot] * characters > best:
                    best = counts[slot] * characters
                at += 1
            elif known:
                best += characters
                at += width
            else:
                at += 1
        shares[row] = best
