"""A few numpy arrays in one file, written atomically, read in slices without loading the rest.

The file begins with one line of JSON (name, dtype, shape, offset of each array), padded to 4,096 bytes; the arrays
follow. Anything can read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    with storage.atomic_write(path) as file:
        file.write(_header(header))
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)


@contextmanager
def growing_array(path: storage.Location, name: str, like: npt.NDArray[Any]) -> Iterator[Callable[..., None]]:
    """A file with one array that is written block by block, so that it need not fit into memory; `like` has its shape.

    >>> import tempfile, os
    >>> place = os.path.join(tempfile.mkdtemp(), "pairs")
    >>> with growing_array(place, "pairs", np.empty((0, 2), np.uint64)) as append:
    ...     append(np.array([[1, 2]]))
    ...     append(np.array([[3, 4], [5, 6]]))
    >>> ArrayFile(place).whole("pairs").tolist()
    [[1, 2], [3, 4], [5, 6]]
    """
    rows = 0
    with storage.atomic_write(path) as file:
        file.write(_header({}))

        def append(block: npt.NDArray[Any]) -> None:
            nonlocal rows
            rows += len(block)
            file.write(np.ascontiguousarray(block, like.dtype).data)

        yield append
        file.seek(0)
        described = {"dtype": like.dtype.str, "shape": (rows, *like.shape[1:]), "offset": _HEADER_BYTES}
        file.write(_header({name: described}))


def _header(described: dict[str, Any]) -> bytes:
    return json.dumps(described).encode().ljust(_HEADER_BYTES - 1) + b"\n"


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

    def count(self, name: str) -> int:
        """How many rows an array has."""
        return int(self._header[name]["shape"][0])

    def whole(self, name: str) -> npt.NDArray[Any]:
        """The whole array, in memory."""
        return np.array(self._map(name))

    def rows(self, name: str, low: int, high: int) -> npt.NDArray[Any]:
        """Rows [low, high)."""
        return np.array(self._map(name)[low:high])

    def take(self, name: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Some rows."""
        return np.array(self._map(name)[rows.astype(np.int64)])

    def position(self, name: str, value: int, low: int = 0, high: int | None = None) -> int:
        """Where a number would stand in a sorted array, or in the part [low, high) of it that is sorted."""
        if value >= 1 << 64:
            return self.count(name) if high is None else high
        return low + int(np.searchsorted(self._map(name)[low:high], np.uint64(value)))

    def positions(self, name: str, values: npt.NDArray[Any], *, side: Any = "left") -> npt.NDArray[np.int64]:
        """Where some numbers would stand in a sorted array."""
        return np.searchsorted(self._map(name), values, side=side)

    def row_position(self, name: str, value: int, low: int = 0, high: int | None = None) -> int:
        """Where a number would stand in the first column of rows, all or [low, high) of which are sorted by it."""
        if value >= 1 << 64:
            return self.count(name) if high is None else high
        return low + int(np.searchsorted(self._map(name)[low:high, 0], np.uint64(value)))
