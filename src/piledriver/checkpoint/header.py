"""`header.json`: what a checkpoint holds, and the mark that its save was finished.

checkpoint_3/
  header.json           written last, in one rename: no header, no checkpoint
  data-5f0c19ab/        named in the header, so that saving to the same folder again never touches what is good
    rank-00000.safetensors ...
    index.json          which box of which tensor is in which file
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
from piledriver.checkpoint.safetensors_file import Written
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
    """What is in a checkpoint, readable without loading it."""

    data: str
    """The folder beside the header with the files."""
    files: Mapping[str, Mapping[str, Any]]
    """Bytes and SHA-256 by file name."""
    contents: Mapping[str, Any]
    """Per kind of object, what was saved of it."""
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
        """The size of all files."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


def file_entries(written: list[Written]) -> dict[str, dict[str, Any]]:
    """The `files` field."""
    return {item.file: {"bytes": item.bytes, "sha256": item.sha256} for item in written}


def versions_here() -> dict[str, str]:
    """What wrote this checkpoint."""
    found = {"python": platform.python_version()}
    for package in ("piledriver", "torch", "numpy", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def now() -> str:
    """The time in UTC, to the millisecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def write_header(folder: Path, header: Header) -> None:
    """Commit: from here on the folder holds a finished checkpoint."""
    fields = asdict(header)
    storage.write_text(folder / HEADER, json.dumps({**fields, "sha256": _digest(fields)}, indent=1) + "\n")


def read_header(folder: storage.Location) -> Header:
    """The header of a finished checkpoint; anything else is an `IncompleteCheckpointError` that says why."""
    folder = Path(folder)
    path = folder / HEADER
    if not folder.is_dir():
        raise IncompleteCheckpointError(f"there is no folder {folder}", fix="check the path")
    if not path.is_file():
        raise IncompleteCheckpointError(
            f"{folder} holds no finished checkpoint (no {HEADER})", fix="choose one that `latest` finds"
        )
    try:
        fields = json.loads(storage.read_text(path))
        written = fields.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError, StorageError) as error:
        raise IncompleteCheckpointError(f"{path} is damaged", fix="load an earlier checkpoint") from error
    if fields.get("format") != FORMAT or written != _digest(fields):
        raise IncompleteCheckpointError(f"{path} is damaged or not ours", fix="load an earlier checkpoint")
    if int(fields["version"]) > VERSION:
        raise CorruptFileError(
            f"{folder} was written in format {fields['version']}, this reads up to {VERSION}", fix="update piledriver"
        )
    return Header(**fields)


def is_ours(path: Path) -> bool:
    """Whether a save made this entry of a checkpoint folder and may remove it: data, or a header never renamed."""
    return (path.name.startswith(DATA) and path.is_dir()) or path.name.startswith(f".{HEADER}.")


def is_complete(folder: storage.Location) -> bool:
    """Whether a folder holds a finished checkpoint with every file there in full length."""
    try:
        check_files(Path(folder), read_header(folder))
    except CorruptFileError:
        return False
    return True


def check_files(folder: Path, header: Header) -> None:
    """Every file is there with its length."""
    for name, entry in header.files.items():
        path = folder / header.data / name
        length = path.stat().st_size if path.is_file() else None
        if length != entry["bytes"]:
            found = "is missing" if length is None else f"has {length} bytes instead of {entry['bytes']}"
            raise IncompleteCheckpointError(f"{path} {found}", fix="load an earlier checkpoint")


def verify(folder: storage.Location, *, part: int = 0, parts: int = 1) -> Header:
    """Read every file (or every `parts`-th from `part` on) again and compare its checksum."""
    folder = Path(folder)
    header = read_header(folder)
    check_files(folder, header)
    for name in sorted(header.files)[part::parts]:
        path = folder / header.data / name
        if storage.sha256(path) != header.files[name]["sha256"]:
            raise IncompleteCheckpointError(
                f"{path} is damaged: its checksum differs from what was saved", fix="load an earlier checkpoint"
            )
    return header


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
