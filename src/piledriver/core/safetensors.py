"""Write safetensors files: names, dtypes and shapes fix the header, so the tensors may follow in any order.

The format is a length, a JSON header and raw bytes (https://github.com/huggingface/safetensors). Nothing here needs
torch: a dtype is known by its name, a tensor by its bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from piledriver.core.errors import StorageError
from piledriver.core.storage import Location

CODES: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""The format's code of each dtype, by torch's name."""
LENGTH_BYTES = 8


class TensorEntry(NamedTuple):
    """One tensor of a file."""

    name: str
    code: str
    shape: tuple[int, ...]
    size: int
    """In bytes."""


def encode_header(
    entries: Iterable[TensorEntry], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """Return what precedes the first tensor, and where in the file each tensor starts.

    >>> start, places = encode_header([TensorEntry("a", "F32", (2,), 8), TensorEntry("b", "F32", (1,), 4)])
    >>> places["b"] - places["a"], len(start) == places["a"]
    (8, True)
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    position = 0
    starts: dict[str, int] = {}
    for name, code, shape, size in entries:
        header[name] = {"dtype": code, "shape": [*shape], "data_offsets": [position, position + size]}
        starts[name] = position
        position += size
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % LENGTH_BYTES)
    start = len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded
    return start, {name: len(start) + at for name, at in starts.items()}


class SafetensorsWriter:
    """A file whose tensors arrive one at a time. It appears under its name in `close`, synced; `abort` removes it."""

    def __init__(self, path: Location, entries: Iterable[TensorEntry]) -> None:
        self._path = os.fspath(path)
        folder, name = os.path.split(self._path)
        self._partial = os.path.join(folder, f".{name}.partial")
        # Wide dtypes first, so that every tensor starts at a multiple of its element size.
        ordered = sorted(entries, key=lambda entry: (-_item_bytes(entry), entry.name))
        start, self._places = encode_header(ordered)
        self._sizes = {entry.name: entry.size for entry in ordered}
        with _naming(self._path):
            self._file = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            self._put(memoryview(start), 0)

    def write(self, name: str, content: memoryview) -> None:
        """Write the bytes of one tensor."""
        if content.nbytes != self._sizes[name]:
            raise StorageError(f"{self._path}: {name} has {content.nbytes} bytes, not {self._sizes[name]}")
        with _naming(self._path):
            self._put(content, self._places[name])

    def close(self) -> None:
        """Sync the file and give it its name."""
        with _naming(self._path):
            os.fsync(self._file)
            self._release()
            os.replace(self._partial, self._path)

    def abort(self) -> None:
        """Leave nothing behind."""
        self._release()
        with suppress(OSError):
            os.unlink(self._partial)

    def _release(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _put(self, content: memoryview, at: int) -> None:
        # A raw write may take only a part: near a full disk, or above 2 GiB.
        while content:
            written = os.pwrite(self._file, content, at)
            content, at = content[written:], at + written


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name the file in errors of the operating system."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}", fix="free some disk space and save again"
        ) from error


def _item_bytes(entry: TensorEntry) -> int:
    count = 1
    for size in entry.shape:
        count *= size
    return entry.size // count if count else 0
