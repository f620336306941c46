"""Counter-based random streams: a number is a pure function of (seed, stream name, indices).

There is no state to save, synchronise or replay: any process computes number 10^12 of a stream directly, with the same
result on every platform. Philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011) on integer arithmetic alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]
IntIndex = int | npt.NDArray[np.integer[Any]]
T = TypeVar("T")

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(
    counter: tuple[UInt64Array, UInt64Array, UInt64Array, UInt64Array], key: tuple[int, int], rounds: int = 10
) -> tuple[UInt64Array, ...]:
    """Apply the Philox4x32 block function to arrays: four 32-bit counter words (in uint64) to four random words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0, product1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (product1 >> _32) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _32) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return c0, c1, c2, c3


@dataclass(frozen=True)
class Stream:
    """One random stream; `Stream(seed, "shuffle")` names it, `child(epoch)` derives another from it.

    >>> stream = Stream(7, "shuffle")
    >>> stream.below(6, 0), stream.below(6, 1)
    (1, 5)
    >>> stream.below(6, 1) == Stream(7, "shuffle").below(6, 1)
    True
    """

    key: int

    def __init__(self, seed: int, *names: str | int) -> None:
        object.__setattr__(self, "key", _digest(repr(int(seed)), *names))

    def child(self, *names: str | int) -> Stream:
        """Return a stream derived by name or indices, independent of its siblings and its parent."""
        made = object.__new__(Stream)
        object.__setattr__(made, "key", _digest(f"{self.key:016x}", *names))
        return made

    def bits(self, index: IntIndex) -> UInt64Array:
        """Return 64 random bits for each index (a number or an array), as a one-dimensional uint64 array."""
        return self._words(index)[0]

    def uniform(self, index: int) -> float:
        """Return a float in [0, 1) with 53 random bits."""
        return float(self.uniforms(index)[0])

    def uniforms(self, index: IntIndex) -> npt.NDArray[np.float64]:
        """Return floats in [0, 1) for an array of indices."""
        return np.asarray((self.bits(index) >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def below(self, bound: int, index: int) -> int:
        """Return an integer in [0, bound), with a bias below 2^-64 for any bound under 2^64."""
        if bound <= 0:
            raise ValueError(f"bound must be positive, got {bound}")
        low, high = self._words(index)
        return (((int(high[0]) << 64) | int(low[0])) * bound) >> 128

    def shuffled(self, items: list[T]) -> list[T]:
        """Return a new list in random order (`Permutation` shuffles what does not fit in memory)."""
        order = np.lexsort((np.arange(len(items)), self.bits(np.arange(len(items)))))
        return [items[i] for i in order]

    def _words(self, index: IntIndex) -> tuple[UInt64Array, UInt64Array]:
        at = np.atleast_1d(np.asarray(index)).astype(np.uint64)
        zero = np.zeros_like(at)
        a, b, c, d = philox4x32((at & _LOW, at >> _32, zero, zero), (self.key & 0xFFFFFFFF, self.key >> 32))
        return a | (b << _32), c | (d << _32)


def _digest(*parts: str | int) -> int:
    # Type and length of each part are hashed too, so that ("a", "bc") and ("ab", "c"), or 1 and "1", differ.
    hasher = hashlib.blake2b(digest_size=8, person=b"pd-stream")
    for part in parts:
        encoded = str(part).encode()
        hasher.update(f"{type(part).__name__}:{len(encoded)}:".encode() + encoded)
    return int.from_bytes(hasher.digest(), "little")
