"""Publish finished shards: from the work folder of a build to their places in the corpus."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from importlib import metadata
from typing import Any

from piledriver.core import storage
from piledriver.corpus.pipeline.chunks import DOCUMENTS
from piledriver.corpus.pipeline.tasks import TaskResult

# Packages that the bytes of a corpus depend on, besides the recipe and the raw files.
_VERSIONED = ("piledriver", "zstandard", "numpy", "lxml", "resiliparse", "ftfy")


def publish_shards(out: str, shards: dict[str, list[TaskResult]]) -> list[dict[str, Any]]:
    """Place shards at `split/NNNNN.jsonl.zst` and remove older ones; return their lines for the manifest."""
    for name in os.listdir(out):
        if name.endswith(".partial"):  # of a ledger or manifest whose writing was interrupted
            os.unlink(os.path.join(out, name))
    published = []
    for split, results in shards.items():
        folder = os.path.join(out, split)
        os.makedirs(folder, exist_ok=True)
        names = [f"{number:05d}.jsonl.zst" for number in range(len(results))]
        for name in set(os.listdir(folder)) - set(names):
            os.unlink(os.path.join(folder, name))
        for name, result in zip(names, results, strict=True):
            _place(result.path(DOCUMENTS), os.path.join(folder, name))
            published.append({"path": f"{split}/{name}", "split": split, **result.values})
        storage.fsync_folder(folder)
    return published


def _place(source: str, target: str) -> None:
    """Hard-link a file where the file system can, copy it where it cannot; atomic."""
    partial = f"{target}.partial"
    if os.path.exists(partial):
        os.unlink(partial)
    try:
        os.link(source, partial)
    except OSError:
        shutil.copyfile(source, partial)
    os.replace(partial, target)
    # If the target is a link to the same file already, `replace` leaves both names.
    with suppress(FileNotFoundError):
        os.unlink(partial)


def versions() -> dict[str, str]:
    """Return the versions of the packages that the bytes depend on."""
    return {name: metadata.version(name) for name in _VERSIONED}
