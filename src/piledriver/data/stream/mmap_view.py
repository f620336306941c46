"""All shards as one array of windows, so that a batch from anywhere is one indexing operation of numpy.

The shards are memory maps somewhere in this process's address space. One view with its origin at the lowest of them,
whose row i is the window that begins i tokens further, has a row for every place in every shard; the rows between the
maps are never asked for. Copying a batch through it takes half the time of a loop over slices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core.errors import CorruptFileError

Array = npt.NDArray[np.int64]


class OneView:
    """Windows of `width` tokens out of any of several arrays of one type."""

    def __init__(self, arrays: list[npt.NDArray[Any]], width: int) -> None:
        # Holding the arrays keeps their maps where they are.
        self._arrays = arrays
        size = arrays[0].dtype.itemsize
        origins = [int(array.__array_interface__["data"][0]) for array in arrays]
        lowest = min(origins)
        if any((origin - lowest) % size for origin in origins):
            raise CorruptFileError("the token shards do not lie at whole tokens in memory", fix="tokenise again")
        self._offsets = np.array([(origin - lowest) // size for origin in origins], dtype=np.int64)
        rows = max(int(offset) + len(array) for offset, array in zip(self._offsets, arrays, strict=True))
        self._rows = np.lib.stride_tricks.as_strided(
            arrays[origins.index(lowest)], (rows, width), (size, size), writeable=False
        )

    def addresses(self, shards: Array, firsts: Array) -> Array:
        """The row of the window that begins at a token of a shard. It must lie within the shard."""
        return self._offsets[shards] + firsts

    def copy(self, addresses: Array) -> npt.NDArray[Any]:
        """The windows in these rows."""
        return self._rows[addresses]
