"""A checkpoint opened for reading: structure as JSON trees, tensors through a catalog, nothing loaded yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piledriver.checkpoint.errors import IncompleteCheckpointError
from piledriver.checkpoint.header import INDEX, STATE, Header, check_files, read_header
from piledriver.checkpoint.tensor_index import Catalog, Chunk, Entry, name_in_file
from piledriver.checkpoint.tree import Json, dtype_of
from piledriver.core.storage import read_text


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a folder holds, whoever wrote it."""

    shared: Mapping[str, list[Json]]
    """Trees of models, optimizers, schedulers, custom objects, scaler."""
    own: Mapping[str, Json]
    """Trees of what this rank saved for itself."""
    catalog: Catalog
    header: Header | None = None
    step: int | None = None
    layout: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def open_ours(folder: Path, rank: int) -> Snapshot:
    """A checkpoint in our own format."""
    header = read_header(folder)
    check_files(folder, header)
    data = folder / header.data
    try:
        state = json.loads(read_text(data / STATE))
        catalog = _catalog(json.loads(read_text(data / INDEX)), data)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise IncompleteCheckpointError(f"{data} is damaged: {error}", fix="load an earlier checkpoint") from error
    ranks = state["ranks"]
    notes: tuple[str, ...] = ()
    if rank >= len(ranks) and any(ranks):
        kept = sorted({name for own in ranks for name in own})
        notes = (f"saved by {len(ranks)} ranks, so rank {rank} finds no {', '.join(kept)} of its own",)
    return Snapshot(
        shared=state["shared"],
        own={**state["common"], **(ranks[rank] if rank < len(ranks) else {})},
        catalog=catalog,
        header=header,
        step=header.step,
        layout=header.layout,
        extra=header.extra,
        notes=notes,
    )


def _catalog(index: Mapping[str, Any], data: Path) -> dict[str, Entry]:
    files = {int(rank): data / name for rank, name in index["files"].items()}
    catalog: dict[str, Entry] = {}
    for key, entry in index["tensors"].items():
        shape = tuple(entry["shape"])
        chunks = tuple(
            Chunk(
                tuple(offsets),
                tuple(sizes),
                file=files[rank],
                name=name_in_file(key, tuple(offsets), whole=tuple(sizes) == shape),
            )
            for rank, offsets, sizes in entry["chunks"]
        )
        catalog[key] = Entry(dtype_of(entry["dtype"]), shape, chunks)
    return catalog
