"""MinHash signatures: estimate the Jaccard similarity of the word shingles of two texts from some hundred bytes each.

Words are those between white space (`corpus/text/words.py`), as in the field.

Words, shingles and signatures are computed in compiled loops. A shingle is a rolling polynomial of its words' hashes;
a permutation is a multiply-add in 32 bits over all shingles, which vectorises. The constants come from a fixed random
stream, so a text has the same signature on every machine and in every version.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from piledriver.core.random import Stream
from piledriver.corpus.dedup.arrays import UInt16Array, UInt32Array, UInt64Array
from piledriver.corpus.text.words import scan_words


@dataclass(frozen=True, kw_only=True)
class MinHashSettings:
    """MinHash-LSH parameters. Texts of Jaccard similarity s are compared with probability 1-(1-s^rows)^bands."""

    shingle_words: int = 5
    """Words in a shingle."""
    bands: int = 20
    """Groups of hash values; texts that agree in all values of a group are compared."""
    rows: int = 6
    """Hash values in a group."""
    check_values: int = 120
    """Further hash values, which make the estimated similarity of compared texts more exact."""
    threshold: float = 0.75
    """Compared texts are duplicates from this estimated similarity on; at 0 every candidate pair is a duplicate."""

    def __post_init__(self) -> None:
        for name in ("shingle_words", "bands", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.check_values < 0:
            raise ValueError(f"check_values is {self.check_values}; it must not be negative")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; it must be from 0 to 1")

    @property
    def permutations(self) -> int:
        """Return the number of hash values in a signature."""
        return self.bands * self.rows + self.check_values


PRESETS = {
    # High recall from similarity 0.8 on; the threshold on verified pairs lets few under 0.7 through
    # (benchmarks/near_dedup.py).
    "piledriver": MinHashSettings(),
    # datatrove's and FineWeb's: every candidate pair is a duplicate.
    "datatrove": MinHashSettings(shingle_words=5, bands=14, rows=8, check_values=0, threshold=0.0),
    # The Pile's: ten permutations for a threshold of one half, in datasketch's bands and rows.
    "pile": MinHashSettings(shingle_words=5, bands=5, rows=2, check_values=0, threshold=0.5),
}


class Signer:
    """Compute signatures with one set of parameters.

    >>> sign = Signer(MinHashSettings(shingle_words=1))
    >>> one, two = sign("a b c d e f g h"), sign("a b c d e f g x")
    >>> 0.6 < similarity(one, two) < 0.95
    True
    """

    def __init__(self, settings: MinHashSettings) -> None:
        self.settings = settings
        bits = Stream(0, "minhash").bits(np.arange(settings.permutations))
        self._multipliers = ((bits & np.uint64(0xFFFFFFFF)) | np.uint64(1)).astype(np.uint32)
        self._offsets = (bits >> np.uint64(32)).astype(np.uint32)

    def __call__(self, text: str) -> UInt16Array:
        """Return the signature of a text; for a text without words it is all ones."""
        smallest = np.full(self.settings.permutations, 0xFFFFFFFF, np.uint32)
        _sign(scan_words(text)[0], self.settings.shingle_words, self._multipliers, self._offsets, smallest)
        # Sixteen bits of each value suffice: unequal values agree in them once in 65,536.
        return smallest.astype(np.uint16)


def similarity(one: UInt16Array, two: UInt16Array) -> float:
    """Return the estimated Jaccard similarity of two texts from their signatures."""
    return float((one == two).mean())


@numba.njit(cache=True, nogil=True)
def band_hashes(signatures: UInt16Array, band: int, rows: int) -> UInt64Array:
    """Return one 64-bit hash of a band of each signature."""
    hashes = np.empty(len(signatures), np.uint64)
    for document in range(len(signatures)):
        hashed = np.uint64(band + 1) * np.uint64(0x9E3779B97F4A7C15)
        for row in range(band * rows, band * rows + rows):
            hashed = (hashed ^ np.uint64(signatures[document, row])) * np.uint64(0xFF51AFD7ED558CCD)
            hashed ^= hashed >> np.uint64(32)
        hashes[document] = hashed
    return hashes


@numba.njit(cache=True, nogil=True)
def _sign(
    words: UInt64Array, width: int, multipliers: UInt32Array, offsets: UInt32Array, smallest: UInt32Array
) -> None:
    base = np.uint64(0x9E3779B97F4A7C15)
    power = np.uint64(1)
    for _ in range(width):
        power *= base
    # A text shorter than a shingle is one shingle.
    count = max(1, words.size - width + 1) if words.size else 0
    shingles = np.empty(count, np.uint32)
    rolling = np.uint64(0)
    for at in range(words.size):
        rolling = rolling * base + words[at]
        if at >= width:
            rolling -= power * words[at - width]
        if at >= width - 1 or at == words.size - 1:
            mixed = (rolling ^ (rolling >> np.uint64(32))) * np.uint64(0xFF51AFD7ED558CCD)
            shingles[max(0, at - width + 1)] = np.uint32(mixed >> np.uint64(32))
    for i in range(smallest.size):
        best = np.uint32(0xFFFFFFFF)
        for at in range(count):
            # Casts keep the arithmetic in 32 bits, where it wraps and vectorises; numba would widen it.
            best = min(best, np.uint32(np.uint32(multipliers[i] * shingles[at]) + offsets[i]))
        smallest[i] = best
