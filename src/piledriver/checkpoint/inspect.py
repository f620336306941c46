"""Describe a checkpoint or weights folder without loading it, for `piledriver checkpoint inspect`."""

from __future__ import annotations

import math
from typing import Any

from piledriver.checkpoint import folders
from piledriver.checkpoint.formats.open import open_any
from piledriver.checkpoint.header import is_complete, verify
from piledriver.checkpoint.opened_checkpoint import OpenedCheckpoint
from piledriver.checkpoint.state_tree import tensor_keys
from piledriver.core.storage import Location


def inspect(location: Location, *, check: bool = False) -> dict[str, Any]:
    """Return a description of a checkpoint or weights folder; of a run folder, that of its latest checkpoint.

    `check` compares the checksum of every file.
    """
    path = folders.resolve_checkpoint(location)
    complete = is_complete(path)
    accelerate = not complete and folders.is_loadable(path)
    opened = open_any(path)
    if check and complete:
        verify(path)
    header = opened.header
    return {
        "path": str(path),
        "kind": "piledriver checkpoint" if complete else "accelerate checkpoint" if accelerate else "weights",
        "step": opened.step,
        "layout": opened.layout,
        "extra": dict(opened.extra),
        "saved_at": header.saved_at if header else None,
        "saved_by_ranks": header.world_size if header else None,
        "versions": dict(header.versions) if header else {},
        "bytes": sum(entry.bytes for entry in opened.index.values()),
        "checksums": "verified" if check and complete else "not verified" if complete else "none",
        "contents": _contents(opened),
        "tensors": {
            key: {
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": list(entry.shape),
                "pieces": len(entry.chunks),
            }
            for key, entry in opened.index.items()
        },
    }


def _contents(opened: OpenedCheckpoint) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind, states in opened.shared.items():
        for index, state in enumerate(states):
            keys = set(tensor_keys(state))
            numbers = sum(math.prod(opened.index[key].shape) for key in keys)
            found[f"{kind}/{index}"] = f"{len(keys)} tensors, {numbers:,} numbers"
    return found | dict.fromkeys(opened.own, "of this rank")
