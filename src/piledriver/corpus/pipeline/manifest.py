"""What was built, from what, by which settings, with checksums. `verify` holds a corpus against it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, StorageError
from piledriver.corpus.shards.reader import count_documents

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The whole account of a build; no times, no paths of the machine: the same build gives the same bytes."""

    name: str
    versions: dict[str, str]
    recipe: dict[str, Any]
    inputs: list[dict[str, Any]]
    """Raw files: source, origin, size, sha256."""
    stages: list[dict[str, Any]]
    """For each stage and source: documents and bytes out, what was dropped and why."""
    mix: dict[str, dict[str, Any]]
    """For each source: bytes asked for and got."""
    outputs: list[dict[str, Any]]
    """Shards: path below the corpus, split, documents, bytes, sha256."""

    def save(self, folder: storage.Location) -> None:
        """Write it: the last thing a build does."""
        storage.write_text(
            storage.join(folder, MANIFEST), json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"
        )


def load_manifest(folder: storage.Location) -> Manifest:
    """The manifest of a finished corpus."""
    path = storage.join(folder, MANIFEST)
    if not storage.exists(path):
        raise StorageError(
            f"{folder} has no {MANIFEST}: it is not a finished corpus", fix="run 'piledriver corpus build' to its end"
        )
    try:
        return Manifest(**json.loads(storage.read_text(path)))
    except (TypeError, ValueError) as error:
        raise CorruptFileError(f"{path} is damaged: {error}", fix="run the build again") from error


def verify(folder: storage.Location) -> list[str]:
    """Every checksum and count again; returns the differences, one line each, none if all is well."""
    manifest = load_manifest(folder)
    differences = []
    listed = {entry["path"] for entry in manifest.outputs}
    for entry in manifest.outputs:
        path = storage.join(folder, *entry["path"].split("/"))
        if not storage.exists(path):
            differences.append(f"{entry['path']} is missing")
        elif storage.sha256(path) != entry["sha256"]:
            differences.append(f"{entry['path']} has another checksum than the manifest says")
        elif "documents" in entry and count_documents(path) != entry["documents"]:
            differences.append(f"{entry['path']} has another number of documents than the manifest says")
    root = str(folder).rstrip("/") + "/"
    for path in storage.files_below(folder):
        name = path.removeprefix(root)
        if name.endswith(".jsonl.zst") and name not in listed and not name.startswith(".work/"):
            differences.append(f"{name} is not in the manifest")
    return differences
