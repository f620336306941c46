"""Folders that torch's own `torch.distributed.checkpoint.save` wrote, also under FSDP in Accelerate.

Their index `.metadata` is a pickle. It is read with the restricted unpickler, which knows only the record classes of
DCP; the tensors inside the `.distcp` files are read with `weights_only`.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from piledriver.checkpoint.errors import IncompleteCheckpointError, UntrustedFileError
from piledriver.checkpoint.tensor_index import Chunk, Entry
from piledriver.core.safe_pickle import DAMAGED_PICKLE, ForbiddenNameError, load_pickle
from piledriver.core.storage import open_read

METADATA = ".metadata"

_RECORDS = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")

# All that an index of tensors names.
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _RECORDS},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{(module, name): PurePosixPath for module in ("pathlib", "pathlib._local") for name in _PATHS},
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


def is_dcp_folder(folder: Path) -> bool:
    """Whether torch's own DCP wrote a folder."""
    return (folder / METADATA).is_file()


def open_dcp(folder: Path) -> dict[str, Entry]:
    """The tensors of a DCP folder; what is not a tensor is left out."""
    try:
        with open_read(folder / METADATA) as file:
            found = load_pickle(file, _ALLOWED, enums=[metadata._MEM_FORMAT_ENCODING])
        entries = found.state_dict_metadata
        places = found.storage_data
    except ForbiddenNameError as error:
        raise UntrustedFileError(
            f"{folder / METADATA} asks for {error.name}, which an index of tensors never needs",
            fix="do not use this file",
        ) from error
    except DAMAGED_PICKLE as error:
        raise IncompleteCheckpointError(f"{folder / METADATA} is damaged: {error}") from error
    catalog: dict[str, Entry] = {}
    for key, entry in entries.items():
        if isinstance(entry, metadata.TensorStorageMetadata):
            chunks = tuple(_chunk(folder, places[metadata.MetadataIndex(key, c.offsets)], c) for c in entry.chunks)
            catalog[key] = Entry(entry.properties.dtype, tuple(entry.size), chunks)
    return catalog


def _chunk(folder: Path, place: Any, chunk: metadata.ChunkStorageMetadata) -> Chunk:
    if Path(place.relative_path).name != place.relative_path:
        raise UntrustedFileError(f"{folder / METADATA} names a file outside its folder", fix="do not use this folder")
    if getattr(place, "transform_descriptors", None):
        raise IncompleteCheckpointError(f"{folder} is compressed by a DCP extension", fix="read it with torch itself")
    return Chunk(
        tuple(chunk.offsets),
        tuple(chunk.sizes),
        file=folder / place.relative_path,
        span=(int(place.offset), int(place.length)),
    )
