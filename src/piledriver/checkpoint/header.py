"""`header.json`: the description of a checkpoint, whose presence marks a complete save.

checkpoint_3/
  header.json           written last, in one rename: a folder without it is no checkpoint
  data-5f0c19ab/        named in the header, so that a second save to the folder does not touch the first
    rank-00000.safetensors ...
    index.json          which chunk of which tensor is in which file
    state.json          everything that is not a tensor
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from piledriver.checkpoint.errors import IncompleteCheckpointError
from piledriver.checkpoint.safetensors_file import WrittenFile
from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, StorageError

HEADER = "header.json"
DATA = "data-"
INDEX = "index.json"
STATE = "state.json"
FORMAT = "piledriver.checkpoint"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Header:
    """Description of a checkpoint, readable without loading it."""

    data: str
    """Name of the folder beside the header that holds the files."""
    files: Mapping[str, Mapping[str, Any]]
    """Bytes and SHA-256 by file name."""
    contents: Mapping[str, Any]
    """What was saved, by kind of object."""
    world_size: int = 1
    step: int | None = None
    layout: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    saved_at: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION

    @property
    def bytes(self) -> int:
        """Return the size of all files."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


def file_entries(written: list[WrittenFile]) -> dict[str, dict[str, Any]]:
    """Return the `files` field of a header."""
    return {item.file: {"bytes": item.bytes, "sha256": item.sha256} for item in written}


def package_versions() -> dict[str, str]:
    """Return the versions of Python and the packages that write a checkpoint."""
    found = {"python": platform.python_version()}
    for package in ("piledriver", "torch", "numpy", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def utc_now() -> str:
    """Return the time in UTC, to the millisecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def write_header(folder: Path, header: Header) -> None:
    """Write the header, which commits the checkpoint."""
    fields = asdict(header)
    storage.write_text(folder / HEADER, json.dumps({**fields, "sha256": _digest(fields)}, indent=1) + "\n")


def read_header(folder: storage.Location) -> Header:
    """Return the header of a complete checkpoint; raise `IncompleteCheckpointError` for any other folder."""
    folder = Path(folder)
    path = folder / HEADER
    if not folder.is_dir():
        raise IncompleteCheckpointError(f"folder {folder} does not exist", fix="check the path")
    if not path.is_file():
        raise IncompleteCheckpointError(
            f"{folder} has no {HEADER}: its save was interrupted, or it is no checkpoint",
            fix="choose one that `latest` finds",
        )
    try:
        fields = json.loads(storage.read_text(path))
        written = fields.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, StorageError) as error:
        raise IncompleteCheckpointError(f"{path} is damaged", fix="load an earlier checkpoint") from error
    if fields.get("format") != FORMAT or written != _digest(fields):
        raise IncompleteCheckpointError(
            f"{path} is damaged, or no header of a checkpoint", fix="load an earlier checkpoint"
        )
    if int(fields["version"]) > VERSION:
        raise CorruptFileError(
            f"{folder} has format version {fields['version']}, this piledriver reads up to {VERSION}",
            fix="update piledriver",
        )
    return Header(**fields)


def is_written_by_save(path: Path) -> bool:
    """Return whether a save wrote this entry of a checkpoint folder and may remove it: data, or a partial header."""
    return (path.name.startswith(DATA) and path.is_dir()) or path.name.startswith(f".{HEADER}.")


def is_complete(folder: storage.Location) -> bool:
    """Return whether a folder is a committed checkpoint with every file at its full length."""
    try:
        require_complete(folder)
    except CorruptFileError:
        return False
    return True


def require_complete(folder: storage.Location) -> Header:
    """Return the header; raise `IncompleteCheckpointError` if it or a file is missing or has another length."""
    header = read_header(folder)
    check_files(Path(folder), header)
    return header


def check_files(folder: Path, header: Header) -> None:
    """Raise `IncompleteCheckpointError` unless every file exists at its full length."""
    for name, entry in header.files.items():
        path = folder / header.data / name
        length = path.stat().st_size if path.is_file() else None
        if length != entry["bytes"]:
            found = "is missing" if length is None else f"has {length} bytes instead of {entry['bytes']}"
            raise IncompleteCheckpointError(f"{path} {found}", fix="load an earlier checkpoint")


def verify(folder: storage.Location, *, part: int = 0, parts: int = 1) -> Header:
    """Compare the checksum of every file, or of every `parts`-th from `part` on, with the header, and return it."""
    folder = Path(folder)
    header = require_complete(folder)
    for name in sorted(header.files)[part::parts]:
        path = folder / header.data / name
        if storage.sha256(path) != header.files[name]["sha256"]:
            raise IncompleteCheckpointError(
                f"{path} is damaged: its checksum differs from the one in {HEADER}", fix="load an earlier checkpoint"
            )
    return header


def verified(path: Path, *, part: int = 0, parts: int = 1) -> Path:
    """Return a path after `verify`, if it is a folder with checksums; other weights have none to compare."""
    if (path / HEADER).is_file():
        verify(path, part=part, parts=parts)
    return path


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
