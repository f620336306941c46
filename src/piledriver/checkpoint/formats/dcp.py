"""Folders that torch's own `torch.distributed.checkpoint.save` wrote, also under FSDP in Accelerate.

Their index `.metadata` is a pickle. It is read with an unpickler that knows only the few record classes of DCP and
refuses everything else; the tensors inside the `.distcp` files are read with `weights_only`.
"""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from piledriver.checkpoint.errors import IncompleteCheckpointError, UntrustedFileError
from piledriver.checkpoint.tensor_index import Chunk, Entry
from piledriver.core.storage import open_read

METADATA = ".metadata"

_RECORDS: dict[tuple[str, str], Any] = {
    (module.__name__, name): getattr(module, name)
    for module, names in (
        (
            metadata,
            (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "TensorProperties",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            ),
        ),
        (filesystem, ("_StorageInfo",)),
    )
    for name in names
}


class _Records(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _RECORDS[module, name]
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return PurePosixPath
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        raise UntrustedFileError(
            f"{METADATA} asks for {module}.{name}, which an index of tensors never needs", fix="do not use this file"
        )


def is_dcp_folder(folder: Path) -> bool:
    """Whether torch's own DCP wrote a folder."""
    return (folder / METADATA).is_file()


def open_dcp(folder: Path) -> dict[str, Entry]:
    """The tensors of a DCP folder; what is not a tensor is left out."""
    try:
        with open_read(folder / METADATA) as file:
            found = _Records(file).load()
        entries = found.state_dict_metadata
        places = found.storage_data
    except (pickle.UnpicklingError, EOFError, AttributeError, TypeError) as error:
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
