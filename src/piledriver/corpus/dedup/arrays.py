"""A few numpy arrays in one file, written atomically, read in slices without loading the rest.

The file begins with one line of JSON (name, dtype, shape, offset of each array), padded to 4,096 bytes; the arrays
follow. Anything can read it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError

_HEADER_BYTES = 4096


def write_arrays(path: storage.Location, **arrays: npt.NDArray[Any]) -> None:
    """Write named arrays."""
    header, offset = {}, _HEADER_BYTES
    for name, array in arrays.items():
        header[name] = {"dtype": array.dtype.str, "shape": array.shape, "offset": offset}
        offset += array.nbytes
    line = json.dumps(header).encode()
    with storage.atomic_write(path) as file:
        file.write(line.ljust(_HEADER_BYTES - 1) + b"\n")
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)


class ArrayFile:
    """Named arrays of one local file, read by slices."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            head = file.read(_HEADER_BYTES)
        try:
            self._header = json.loads(head)
        except ValueError as error:
            raise CorruptFileError(f"{path} is not an array file", fix="remove it and run the build again") from error

    def _map(self, name: str) -> npt.NDArray[Any]:
        entry = self._header[name]
        shape = tuple(entry["shape"])
        if 0 in shape:
            return np.empty(shape, entry["dtype"])
        return np.memmap(self.path, entry["dtype"], "r", entry["offset"], shape)

    def whole(self, name: str) -> npt.NDArray[Any]:
        """The whole array, in memory."""
        return np.array(self._map(name))

    def rows(self, name: str, low: int, high: int) -> npt.NDArray[Any]:
        """Rows [low, high)."""
        return np.array(self._map(name)[low:high])

    def slice(self, name: str, row: int, low: int, high: int) -> npt.NDArray[Any]:
        """Elements [low, high) of one row."""
        return np.array(self._map(name)[row, low:high])

    def take(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Some rows."""
        return np.array(self._map(name)[rows.astype(np.int64)])

    def searchsorted(self, name: str, row: int, value: int) -> int:
        """Where a value would stand in one sorted row of unsigned numbers."""
        line = self._map(name)[row]
        return len(line) if value >= 1 << 64 else int(np.searchsorted(line, np.uint64(value)))

    def searchsorted_rows(self, name: str, value: int) -> int:
        """Where a value would stand in the first column of sorted rows."""
        return int(np.searchsorted(self._map(name)[:, 0], np.uint64(value)))

    def position(self, name: str, value: int) -> int:
        """Where a value would stand in a sorted array of one dimension."""
        return int(np.searchsorted(self._map(name), np.uint64(value)))
