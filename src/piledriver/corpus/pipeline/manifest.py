"""The manifest: what was built, from which inputs and settings, with checksums, which `verify_corpus` recomputes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, StorageError
from piledriver.corpus.shards.reader import count_documents

MANIFEST = "manifest.json"
# Packages that the bytes of a corpus depend on, besides the recipe and the raw files.
_VERSIONED = ("piledriver", "zstandard", "numpy", "lxml", "resiliparse", "ftfy")


@dataclass(frozen=True)
class Manifest:
    """The record of a build. It holds no times and no paths of the machine, so the same build gives the same bytes."""

    name: str
    versions: dict[str, str]
    recipe: dict[str, Any]
    inputs: list[dict[str, Any]]
    """Raw files: source, origin, size and sha256 of each."""
    stages: list[dict[str, Any]]
    """For each stage and source: documents and bytes kept, documents dropped by reason."""
    mix: dict[str, dict[str, Any]]
    """For each source: bytes or tokens asked for and got."""
    outputs: list[dict[str, Any]]
    """Shards and ledger: path below the corpus, split, documents, bytes, sha256."""
    key: str = ""
    """Hash of everything that determines the corpus; empty in version 0.1."""

    def save(self, folder: storage.Location) -> None:
        """Write the manifest, which marks a corpus as finished."""
        storage.write_text(
            storage.join(folder, MANIFEST), json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        )


def load_manifest(folder: storage.Location) -> Manifest:
    """Return the manifest of a finished corpus."""
    path = storage.join(folder, MANIFEST)
    if not storage.exists(path):
        raise StorageError(
            f"{folder} has no {MANIFEST}: the corpus is not finished",
            fix="run 'piledriver corpus build' again to resume it",
        )
    try:
        return Manifest(**json.loads(storage.read_text(path)))
    except (TypeError, ValueError) as error:
        raise CorruptFileError(f"{path} is damaged: {error}", fix="run the build again") from error


def finished_manifest(folder: storage.Location, key: str) -> Manifest | None:
    """Return the manifest of a finished corpus with this key whose files have their sizes, or None."""
    if not storage.exists(storage.join(folder, MANIFEST)):
        return None
    manifest = load_manifest(folder)
    sizes = {storage.join(folder, *entry["path"].split("/")): entry["bytes"] for entry in manifest.outputs}
    whole = all(storage.exists(path) and storage.size(path) == size for path, size in sizes.items())
    return manifest if manifest.key == key and whole else None


def verify_corpus(folder: storage.Location) -> list[str]:
    """Recompute every checksum and count; return the differences to the manifest, one line each."""
    manifest = load_manifest(folder)
    differences = []
    listed = {entry["path"] for entry in manifest.outputs}
    for entry in manifest.outputs:
        path = storage.join(folder, *entry["path"].split("/"))
        if not storage.exists(path):
            differences.append(f"{entry['path']} is missing")
        elif storage.sha256(path) != entry["sha256"]:
            differences.append(f"{entry['path']} differs from its checksum in the manifest")
        elif "documents" in entry and count_documents(path) != entry["documents"]:
            differences.append(f"{entry['path']} differs from its number of documents in the manifest")
    root = str(folder).rstrip("/") + "/"
    for path in storage.files_below(folder):
        name = path.removeprefix(root)
        if name.endswith(".jsonl.zst") and name not in listed and not name.startswith(".work/"):
            differences.append(f"{name} is not in the manifest")
    return differences


def versions() -> dict[str, str]:
    """Return the versions of the packages that the bytes depend on."""
    return {name: metadata.version(name) for name in _VERSIONED}
