"""Schema of `tokens.json` and of a shard's metadata file: keys, types, and counts that add up.

Both are validated before any file is read by their numbers, so that a flipped byte is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from piledriver.core import storage
from piledriver.core.json_file import checked, damaged_file, read_json

MANIFEST = "tokens.json"
FORMAT = "piledriver-tokens"
AGAIN = (
    "run the command that wrote it again (piledriver tokenize, or piledriver train on a corpus) with the same "
    "arguments: complete shards are kept"
)


@dataclass(frozen=True, kw_only=True)
class _File:
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class _Files:
    tokens: _File
    starts: _File
    index: _File
    names: _File


@dataclass(frozen=True, kw_only=True)
class _Group:
    source: str
    licence: str
    documents: int
    tokens: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class _ShardMetadata:
    name: str
    documents: int
    tokens: int
    bytes: int
    max_token: int
    groups: tuple[_Group, ...]
    files: _Files

    def __post_init__(self) -> None:
        _add_up(self, self.groups, f"groups of shard {self.name}")
        if not self.name or "/" in self.name:
            raise ValueError(f"a shard has the name {self.name!r}")


@dataclass(frozen=True, kw_only=True)
class _Tokenizer:
    file: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class _Input:
    name: str
    bytes: int
    xxh3_128: str | None = None
    """Hash of the content."""
    ends_sha256: str | None = None
    """Checksum of the first and last 64 KiB, which version 0.1 wrote."""


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    format: str
    version: int
    dtype: Literal["<u2", "<u4"]
    vocab_size: int
    boundary: int
    tokenizer: _Tokenizer
    shard_tokens: int
    unit_bytes: int
    inputs: tuple[_Input, ...]
    documents: int
    tokens: int
    bytes: int
    shards: tuple[_ShardMetadata, ...]

    def __post_init__(self) -> None:
        _add_up(self, self.shards, "shards")


def _add_up(whole: Any, parts: tuple[Any, ...], called: str) -> None:
    for name in ("documents", "tokens", "bytes"):
        said, found = getattr(whole, name), sum(getattr(part, name) for part in parts)
        if said != found or any(getattr(part, name) < 0 for part in parts):
            raise ValueError(f"{name} is {said}, but the {called} hold {found}")


def read_manifest(folder: storage.Location) -> dict[str, Any]:
    """Return the validated content of a folder's `tokens.json`."""
    path = storage.join(folder, MANIFEST)
    manifest = read_json(path, again=AGAIN)
    named = (manifest.get("format"), manifest.get("version"))
    if named != (FORMAT, 1):
        raise damaged_file(path, f"format {named[0]!r} version {named[1]!r}", again=AGAIN)
    checked(_Manifest, manifest, path, again=AGAIN)
    return manifest


def read_shard_metadata(path: storage.Location) -> dict[str, Any]:
    """Return the validated metadata of one shard."""
    metadata = read_json(path, again=AGAIN)
    checked(_ShardMetadata, metadata, path, again=AGAIN)
    return metadata
