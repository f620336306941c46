"""Extents: where in a file the bytes of a tensor are. Headers of safetensors files are read, never their data."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass

import torch

from piledriver.core.errors import CorruptFileError, MissingFileError
from piledriver.core.safetensors import CODES, LENGTH_BYTES
from piledriver.engine.offload.disk.block_file import BlockFile

_DTYPES = {code: getattr(torch, name) for name, code in CODES.items()}
_DTYPES |= {"C64": torch.complex64, "F8_E8M0": torch.float8_e8m0fnu}
_LARGEST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Extent:
    """The bytes of one tensor in a file."""

    path: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: BlockFile | None = None
    """The open file, where it has no name; `path` is then its folder."""

    @property
    def count(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.count * self.dtype.itemsize


def safetensors_extents(path: str | os.PathLike[str]) -> dict[str, Extent]:
    """Return the extent of each tensor of a safetensors file; a truncated or damaged file is an error."""
    name = os.fspath(path)
    try:
        size = os.stat(name).st_size
    except FileNotFoundError:
        raise MissingFileError(name, fix="download or save the checkpoint again: an index names this file") from None
    with open(name, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, _LARGEST_HEADER_BYTES):
            raise CorruptFileError(f"{name} is truncated, or no safetensors file", fix="download or save it again")
        try:
            header = json.loads(file.read(length))
            start = LENGTH_BYTES + length
            found = {
                key: Extent(name, start + at["data_offsets"][0], _DTYPES[at["dtype"]], tuple(at["shape"]))
                for key, at in header.items()
                if key != "__metadata__"
            }
            end = start + max((at["data_offsets"][1] for key, at in header.items() if key != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CorruptFileError(f"{name} has a damaged header: {error}", fix="download or save it again") from error
    if end > size:
        raise CorruptFileError(
            f"{name} is truncated: it has {size:,} bytes, its header describes {end:,}", fix="download or save it again"
        )
    return found
