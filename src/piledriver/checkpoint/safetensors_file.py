"""One safetensors file: written in a stream with its checksum, read region by region.

The format is a length, a JSON header and raw bytes (https://github.com/huggingface/safetensors). We write it ourselves
to hash and sync the bytes while they pass; files are read with the safetensors package.
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
class Written:
    """What was written: enough to notice later that it changed."""

    file: str
    bytes: int
    sha256: str


def write_file(
    path: Path, tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str] | None = None
) -> Written:
    """Write tensors to a new file, synced to the disk. A tensor is brought to the host only while it is written."""
    # The largest items first, so that every tensor starts where its element size divides the offset.
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
    return Written(path.name, written, digest.hexdigest())


def _entry(name: str, tensor: torch.Tensor) -> TensorEntry:
    code = _CODES.get(tensor.dtype)
    shape = tuple(tensor.shape) if code else (*tensor.shape, tensor.dtype.itemsize)
    return TensorEntry(name, code or "U8", shape, tensor.numel() * tensor.dtype.itemsize)


def _blocks(start: bytes, tensors: Sequence[tuple[str, torch.Tensor]]) -> Iterator[memoryview]:
    yield memoryview(start)
    for _, tensor in tensors:
        if tensor.numel():
            flat = memoryview(as_bytes(tensor).numpy())  # type: ignore[arg-type]
            yield from (flat[at : at + _BLOCK_BYTES] for at in range(0, len(flat), _BLOCK_BYTES))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, as a flat uint8 tensor in host memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _write_all(descriptor: int, block: memoryview) -> int:
    # A raw write may take only a part: near a full disk, or above 2 GiB.
    rest = block
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    return len(block)


def read_header(path: Path) -> tuple[dict[str, object], int]:
    """A file's JSON header and where its bytes start."""
    size = path.stat().st_size if path.is_file() else 0
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, _LARGEST_HEADER_BYTES):
            raise IncompleteCheckpointError(f"{path} is not a whole safetensors file", fix="download or save it again")
        try:
            return json.loads(file.read(length)), LENGTH_BYTES + length
        except ValueError as error:
            raise IncompleteCheckpointError(f"{path} has a damaged header", fix="download or save it again") from error


def read_layout(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Each tensor's dtype and shape."""
    header, _ = read_header(path)
    layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, fields in header.items():
        if name == "__metadata__" or not isinstance(fields, dict):
            continue
        if fields["dtype"] not in _DTYPES:
            raise IncompleteCheckpointError(f"{path} holds {name} in the unknown dtype {fields['dtype']}")
        layout[name] = (_DTYPES[fields["dtype"]], tuple(fields["shape"]))
    return layout


def read_metadata(path: Path) -> dict[str, str]:
    """The free text fields of a file."""
    header, _ = read_header(path)
    found = header.get("__metadata__")
    return dict(found) if isinstance(found, dict) else {}


@contextmanager
def open_file(path: Path) -> Iterator[ReadRegion]:
    """Open a file for reading regions of its tensors; only the bytes asked for are touched."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:

            def read(name: str, region: Region, dtype: torch.dtype) -> torch.Tensor:
                found: torch.Tensor = file.get_slice(name)[region] if region else file.get_tensor(name)
                if found.dtype == dtype:
                    return found
                # A dtype that safetensors lacks was written as bytes, one more dimension at the end.
                return found.contiguous().view(dtype).squeeze(-1) if dtype not in _CODES else found

            yield read
    except (SafetensorError, OSError) as error:
        raise IncompleteCheckpointError(f"cannot read {path}: {error}", fix="load an earlier checkpoint") from error
