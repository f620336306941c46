"""Safetensors files: written as a stream with a checksum, read region by region.

The format is a length, a JSON header and raw bytes (https://github.com/huggingface/safetensors). Files are written here
rather than by the safetensors package to hash and sync the bytes on the way; the package reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from piledriver.checkpoint.errors import IncompleteCheckpointError
from piledriver.core.errors import StorageError
from piledriver.core.safetensors import CODES, LENGTH_BYTES, TensorEntry, encode_header

_CODES: dict[torch.dtype, str] = {getattr(torch, name): code for name, code in CODES.items()}
_DTYPES = {code: dtype for dtype, code in _CODES.items()} | {"C64": torch.complex64, "F8_E8M0": torch.float8_e8m0fnu}
_LARGEST_HEADER_BYTES = 100_000_000
_BLOCK_BYTES = 16 << 20

Region = tuple[slice, ...]
ReadRegion = Callable[[str, Region, torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Name, size and checksum of a written file."""

    file: str
    bytes: int
    sha256: str


def write_safetensors(
    path: Path, tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str] | None = None
) -> WrittenFile:
    """Write tensors to a new file and sync it. A tensor is copied to the host only while it is written."""
    # Largest element sizes first, so that the element size of a tensor divides its offset.
    ordered = sorted(tensors, key=lambda pair: (-pair[1].dtype.itemsize, pair[0]))
    start, _ = encode_header([_entry(name, tensor) for name, tensor in ordered], metadata)
    digest = hashlib.sha256()
    written = 0
    try:
        with open(path, "wb", buffering=0) as file:
            for block in _blocks(start, ordered):
                digest.update(block)
                written += _write_all(file.fileno(), block)
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}", fix="free some disk space and save again"
        ) from error
    return WrittenFile(path.name, written, digest.hexdigest())


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    code = _CODES.get(tensor.dtype)
    shape = tuple(tensor.shape) if code else (*tensor.shape, tensor.dtype.itemsize)
    return TensorEntry(name, code or "U8", shape, tensor.numel() * tensor.dtype.itemsize)


def _blocks(start: bytes, tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[memoryview]:
    yield memoryview(start)
    for _, tensor in tensors:
        if tensor.numel():
            flat = memoryview(tensor_bytes(tensor).numpy())  # type: ignore[arg-type]
            yield from (flat[at : at + _BLOCK_BYTES] for at in range(0, len(flat), _BLOCK_BYTES))


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a flat uint8 tensor in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _write_all(descriptor: int, block: memoryview) -> int:
    # A raw write may be partial: near a full disk, or above 2 GiB.
    rest = block
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    return len(block)


def read_safetensors_header(path: Path) -> tuple[dict[str, object], int]:
    """Return the JSON header of a file and the offset of its data."""
    size = path.stat().st_size if path.is_file() else 0
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, _LARGEST_HEADER_BYTES):
            raise IncompleteCheckpointError(
                f"{path} is truncated, or no safetensors file", fix="download or save it again"
            )
        try:
            return json.loads(file.read(length)), LENGTH_BYTES + length
        except ValueError as error:
            raise IncompleteCheckpointError(f"{path} has a damaged header", fix="download or save it again") from error


def read_tensor_specs(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor, by name."""
    header, _ = read_safetensors_header(path)
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, fields in header.items():
        if name == "__metadata__" or not isinstance(fields, dict):
            continue
        if fields["dtype"] not in _DTYPES:
            raise IncompleteCheckpointError(f"{path}: {name} has the unknown dtype {fields['dtype']}")
        layout[name] = (_DTYPES[fields["dtype"]], tuple(fields["shape"]))
    return layout


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file."""
    header, _ = read_safetensors_header(path)
    found = header.get("__metadata__")
    return dict(found) if isinstance(found, dict) else {}


@contextmanager
def open_safetensors(path: Path) -> Iterator[ReadRegion]:
    """Open a file for reading regions of its tensors; only the bytes of a region are read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:

            def read(name: str, region: Region, dtype: torch.dtype) -> torch.Tensor:
                found: torch.Tensor = file.get_slice(name)[region] if region else file.get_tensor(name)
                if found.dtype == dtype:
                    return found
                # A dtype that safetensors lacks is written as bytes with one more dimension.
                return found.contiguous().view(dtype).squeeze(-1) if dtype not in _CODES else found

            yield read
    except (SafetensorError, OSError) as error:
        raise IncompleteCheckpointError(f"cannot read {path}: {error}", fix="load an earlier checkpoint") from error
