"""One strided view over all memory-mapped shards, so that copying a batch is one numpy indexing operation.

The shards are mapped somewhere in this process's address space. The view starts at the lowest address; its row i is the
window that begins i tokens later, so that every position of every shard is a row. Rows between the maps are never read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core.errors import CorruptFileError

Array = npt.NDArray[np.int64]


class MmapView:
    """Windows of `width` tokens from any of several arrays of one dtype."""

    def __init__(self, arrays: list[npt.NDArray[Any]], width: int) -> None:
        # Holding the arrays keeps their maps alive.
        self._arrays = arrays
        size = arrays[0].dtype.itemsize
        origins = [int(array.__array_interface__["data"][0]) for array in arrays]
        lowest = min(origins)
        if any((origin - lowest) % size for origin in origins):
            raise CorruptFileError(
                "the token shards are not aligned to tokens in memory", fix="tokenise the corpus again"
            )
        self._offsets = np.array([(origin - lowest) // size for origin in origins], dtype=np.int64)
        count = max(int(offset) + len(array) for offset, array in zip(self._offsets, arrays, strict=True))
        self._windows = np.lib.stride_tricks.as_strided(
            arrays[origins.index(lowest)], (count, width), (size, size), writeable=False
        )

    def rows(self, shards: Array, firsts: Array) -> Array:
        """Return the row of each window, given its shard and first token. A window must end within its shard."""
        return self._offsets[shards] + firsts

    def copy(self, rows: Array) -> npt.NDArray[Any]:
        """Return a copy of the windows in these rows."""
        return self._windows[rows]
