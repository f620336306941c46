"""A random permutation of any length in constant memory, computed in both directions.

A balanced Feistel network over the smallest even number of bits that covers the length; values outside the range are
encrypted again until they are inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core.random import Stream

_ROUNDS = 6
_MIX = np.uint64(0xBF58476D1CE4E5B9)


class Permutation:
    """A bijection of range(length), drawn by a stream.

    >>> order = Permutation(10, Stream(0, "shuffle"))
    >>> sorted(order(i) for i in range(10)) == list(range(10))
    True
    >>> order.inverse(order(3))
    3
    """

    def __init__(self, length: int, stream: Stream) -> None:
        if not 0 <= length < 2**62:
            raise ValueError(f"length must be from 0 to 2**62, got {length}")
        self.length = length
        half_bits = max(1, ((max(length, 2) - 1).bit_length() + 1) // 2)
        self._half = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        self._keys = [np.uint64(k) for k in stream.bits(np.arange(_ROUNDS))]

    def __len__(self) -> int:
        return self.length

    def __call__(self, index: int) -> int:
        """Return the item at a position of the shuffled order."""
        return int(self.at(np.array([index]))[0])

    def inverse(self, item: int) -> int:
        """Return the position of an item in the shuffled order."""
        return int(self.positions(np.array([item]))[0])

    def at(self, indices: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return the items at an array of positions."""
        return self._walk(indices, self._keys)

    def positions(self, items: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return the positions of an array of items."""
        # The inverse of a Feistel network is the network with its halves swapped and its keys reversed.
        return self._walk(items, self._keys[::-1], swapped=True)

    def _walk(
        self, values: npt.NDArray[np.integer[Any]], keys: list[np.uint64], swapped: bool = False
    ) -> npt.NDArray[np.int64]:
        if values.size and not (int(values.min()) >= 0 and int(values.max()) < self.length):
            raise IndexError(f"index outside range({self.length})")
        out = self._rounds(values.astype(np.uint64), keys, swapped)
        outside = np.flatnonzero(out >= self.length)
        while outside.size:
            walked = self._rounds(out[outside], keys, swapped)
            out[outside] = walked
            outside = outside[walked >= self.length]
        return out.astype(np.int64)

    def _rounds(self, values: npt.NDArray[np.uint64], keys: list[np.uint64], swapped: bool) -> npt.NDArray[np.uint64]:
        left, right = values >> self._half, values & self._mask
        if swapped:
            left, right = right, left
        for key in keys:
            mixed = (right + key) * _MIX
            mixed = (mixed ^ (mixed >> np.uint64(29))) * _MIX
            left, right = right, left ^ ((mixed >> np.uint64(32)) & self._mask)
        if swapped:
            left, right = right, left
        return (left << self._half) | right
