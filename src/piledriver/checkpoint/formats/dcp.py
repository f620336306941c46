"""Folders of `torch.distributed.checkpoint.save` (DCP), also as Accelerate writes them under FSDP.

Their index `.metadata` is a pickle. It is read with the restricted unpickler, which knows only the record classes of
DCP; the tensors inside the `.distcp` files are read with `weights_only`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import metadata

from piledriver.checkpoint.errors import IncompleteCheckpointError, UntrustedFileError
from piledriver.checkpoint.folder_kinds import DCP_METADATA
from piledriver.checkpoint.tensor_index import IndexedTensor, TensorChunk
from piledriver.checkpoint.torch_private import DCP_ENUMS, DCP_NAMES
from piledriver.core.safe_pickle import DAMAGED_PICKLE, ForbiddenNameError, load_restricted_pickle
from piledriver.core.storage import open_read


def open_dcp(folder: Path) -> dict[str, IndexedTensor]:
    """Return the index of the tensors of a DCP folder; other values are skipped."""
    try:
        with open_read(folder / DCP_METADATA) as file:
            found = load_restricted_pickle(file, DCP_NAMES, enums=DCP_ENUMS)
        entries = found.state_dict_metadata
        places = found.storage_data
    except ForbiddenNameError as error:
        raise UntrustedFileError(
            f"{folder / DCP_METADATA} asks for {error.name}, which an index of tensors never needs",
            fix="do not use this file",
        ) from error
    except DAMAGED_PICKLE as error:
        raise IncompleteCheckpointError(f"{folder / DCP_METADATA} is damaged: {error}") from error
    index: dict[str, IndexedTensor] = {}
    for key, entry in entries.items():
        if isinstance(entry, metadata.TensorStorageMetadata):
            chunks = tuple(_chunk(folder, places[metadata.MetadataIndex(key, c.offsets)], c) for c in entry.chunks)
            index[key] = IndexedTensor(entry.properties.dtype, tuple(entry.size), chunks)
    return index


def _chunk(folder: Path, place: Any, chunk: metadata.ChunkStorageMetadata) -> TensorChunk:
    if Path(place.relative_path).name != place.relative_path:
        raise UntrustedFileError(
            f"{folder / DCP_METADATA} names a file outside its folder", fix="do not use this folder"
        )
    if getattr(place, "transform_descriptors", None):
        raise IncompleteCheckpointError(f"{folder} is compressed by a DCP extension", fix="read it with torch itself")
    return TensorChunk(
        tuple(chunk.offsets),
        tuple(chunk.sizes),
        file=folder / place.relative_path,
        span=(int(place.offset), int(place.length)),
    )
