"""Every use of torch's private API in this room, so that an upgrade of torch is checked in one file."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, metadata


def is_live_group(group: dist.ProcessGroup) -> bool:
    """Return whether a process group still exists: the world it belongs to may have been destroyed."""
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map


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

DCP_NAMES: dict[tuple[str, str], Any] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _RECORDS},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    **{(module, name): PurePosixPath for module in ("pathlib", "pathlib._local") for name in _PATHS},
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
"""All that the pickled index of a DCP folder may name, by module and name."""
DCP_ENUMS = [metadata._MEM_FORMAT_ENCODING]
"""The enumerations among them."""
