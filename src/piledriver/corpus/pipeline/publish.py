"""Finished shards from the work folder to their places in the corpus."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from importlib import metadata
from typing import Any

from piledriver.core import storage
from piledriver.corpus.pipeline.chunks import DOCUMENTS
from piledriver.corpus.pipeline.tasks import Done

# What the bytes of a corpus depend on besides the recipe and the raw files.
_VERSIONED = ("piledriver", "zstandard", "numpy", "lxml", "resiliparse", "ftfy")


def publish(out: str, shards: dict[str, list[Done]]) -> list[dict[str, Any]]:
    """Put the shards under `split/NNNNN.jsonl.zst` and remove older ones; returns their lines for the manifest."""
    for name in os.listdir(out):
        if name.endswith(".partial"):  # of a ledger or a manifest that was being written when somebody killed it
            os.unlink(os.path.join(out, name))
    published = []
    for split, dones in shards.items():
        folder = os.path.join(out, split)
        os.makedirs(folder, exist_ok=True)
        names = [f"{number:05d}.jsonl.zst" for number in range(len(dones))]
        for name in set(os.listdir(folder)) - set(names):
            os.unlink(os.path.join(folder, name))
        for name, done in zip(names, dones, strict=True):
            _place(done.path(DOCUMENTS), os.path.join(folder, name))
            published.append({"path": f"{split}/{name}", "split": split, **done.result})
        storage.fsync_folder(folder)
    return published


def _place(source: str, target: str) -> None:
    """A second name for the same bytes where the file system can, a copy where it cannot."""
    partial = f"{target}.partial"
    if os.path.exists(partial):
        os.unlink(partial)
    try:
        os.link(source, partial)
    except OSError:
        shutil.copyfile(source, partial)
    os.replace(partial, target)
    # Where the target is the same file already, renaming one of its names to the other leaves both.
    with suppress(FileNotFoundError):
        os.unlink(partial)


def versions() -> dict[str, str]:
    """The versions of what made the bytes."""
    return {name: metadata.version(name) for name in _VERSIONED}
