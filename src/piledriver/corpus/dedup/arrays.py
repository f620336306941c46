"""Named numpy arrays in a folder, one `.npy` file each: written atomically, read through a memory map.

A slice of a mapped array costs the pages that it touches, so a task can search and read its part of a large array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError

Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]
UInt16Array = npt.NDArray[np.uint16]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]


def write_arrays(folder: storage.Location, **arrays: npt.NDArray[Any]) -> None:
    """Write each array to `folder/name.npy`."""
    for name, array in arrays.items():
        with storage.atomic_write(_path(folder, name)) as file:
            _write_header(file, array.dtype, array.shape)
            file.write(np.ascontiguousarray(array).data)


@contextmanager
def growing_array(
    folder: storage.Location, name: str, dtype: npt.DTypeLike, *row_shape: int
) -> Iterator[Callable[[npt.NDArray[Any]], None]]:
    """Yield a function that appends blocks of rows to one array, so that the whole never has to fit into memory.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with growing_array(folder, "pairs", np.uint64, 2) as append:
    ...     append(np.array([[1, 2]]))
    ...     append(np.array([[3, 4], [5, 6]]))
    >>> open_array(folder, "pairs").tolist()
    [[1, 2], [3, 4], [5, 6]]
    """
    rows = 0
    with storage.atomic_write(_path(folder, name)) as file:
        _write_header(file, dtype, (rows, *row_shape))

        def append(block: npt.NDArray[Any]) -> None:
            nonlocal rows
            rows += len(block)
            file.write(np.ascontiguousarray(block, dtype).data)

        yield append
        # numpy pads the header so that the first dimension can grow in place.
        file.seek(0)
        _write_header(file, dtype, (rows, *row_shape))


def open_array(folder: str, name: str) -> npt.NDArray[Any]:
    """Return a read-only memory map of `folder/name.npy`. Copy a slice that has to outlive the map."""
    path = _path(folder, name)
    # Not np.load, which opens the file three times: small tasks would notice.
    with open(path, "rb") as file:
        try:
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            if 0 in shape:
                return np.empty(shape, dtype)
            return np.memmap(file, dtype, "r", file.tell(), shape)
        except ValueError as error:
            raise CorruptFileError(f"{path} is not a whole .npy file", fix="run the build again without it") from error


def position(values: npt.NDArray[Any], bound: int) -> int:
    """Return how many of some sorted unsigned numbers are below a bound, which may be 2^64."""
    return len(values) if bound >= 1 << 64 else int(np.searchsorted(values, np.uint64(bound)))


def _path(folder: storage.Location, name: str) -> str:
    return storage.join(folder, f"{name}.npy")


def _write_header(file: BinaryIO, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> None:
    described = np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(file, {"descr": described, "fortran_order": False, "shape": shape})
