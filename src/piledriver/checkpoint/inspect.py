"""What is in a folder, without loading it: for people and for `piledriver checkpoint inspect`."""

from __future__ import annotations

from typing import Any

from piledriver.checkpoint import folders
from piledriver.checkpoint.formats.huggingface import weights_of
from piledriver.checkpoint.header import is_complete, verify
from piledriver.checkpoint.loading.model import open_snapshot
from piledriver.checkpoint.snapshot import Snapshot
from piledriver.checkpoint.tree import tensor_keys
from piledriver.core.storage import Location


def inspect(location: Location, *, check: bool = False) -> dict[str, Any]:
    """A description of a checkpoint or a weights folder. A run's folder stands for its latest checkpoint.

    `check` reads every file again and compares checksums.
    """
    path = folders.meant(location)
    ours = is_complete(path)
    theirs = not ours and folders.is_good(path)
    snapshot = open_snapshot(path, 0) if ours or theirs else weights_of(path)
    if check and ours:
        verify(path)
    header = snapshot.header
    return {
        "path": str(path),
        "kind": "piledriver checkpoint" if ours else "accelerate checkpoint" if theirs else "weights",
        "step": snapshot.step,
        "layout": snapshot.layout,
        "extra": dict(snapshot.extra),
        "saved_at": header.saved_at if header else None,
        "saved_by_ranks": header.world_size if header else None,
        "versions": dict(header.versions) if header else {},
        "bytes": sum(entry.bytes for entry in snapshot.catalog.values()),
        "checksums": "verified" if check and ours else "not verified" if ours else "none",
        "contents": _contents(snapshot),
        "tensors": {
            key: {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": list(entry.shape),
                "pieces": len(entry.chunks),
            }
            for key, entry in snapshot.catalog.items()
        },
    }


def _contents(snapshot: Snapshot) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind, states in snapshot.shared.items():
        for index, state in enumerate(states):
            keys = set(tensor_keys(state))
            numbers = sum(_numel(snapshot, key) for key in keys)
            found[f"{kind}/{index}"] = f"{len(keys)} tensors, {numbers:,} numbers"
    return found | dict.fromkeys(snapshot.own, "of this rank")


def _numel(snapshot: Snapshot, key: str) -> int:
    count = 1
    for size in snapshot.catalog[key].shape:
        count *= size
    return count
