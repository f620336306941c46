"""A checkpoint opened for reading: structure as JSON trees, tensors by index, nothing loaded yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from piledriver.checkpoint.errors import IncompleteCheckpointError
from piledriver.checkpoint.header import INDEX, STATE, Header, require_complete
from piledriver.checkpoint.rank_states import read_rank_state
from piledriver.checkpoint.state_tree import Json, dtype_of
from piledriver.checkpoint.tensor_index import IndexedTensor, TensorChunk, TensorIndex, chunk_name
from piledriver.core.storage import read_text


@dataclass(frozen=True, kw_only=True)
class OpenedCheckpoint:
    """What a folder holds, in whichever format."""

    shared: Mapping[str, list[Json]]
    """Trees of models, optimizers, schedulers, custom objects and scaler."""
    own: Mapping[str, Json]
    """Trees of the states of this rank."""
    index: TensorIndex
    """Where each tensor of the trees is."""
    header: Header | None = None
    step: int | None = None
    layout: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def open_checkpoint(folder: Path, rank: int) -> OpenedCheckpoint:
    """Open a checkpoint in piledriver's own format."""
    header = require_complete(folder)
    data = folder / header.data
    try:
        state = json.loads(read_text(data / STATE))
        index = _tensor_index(json.loads(read_text(data / INDEX)), data)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise IncompleteCheckpointError(f"{data} is damaged: {error}", fix="load an earlier checkpoint") from error
    ranks = state["ranks"]
    notes: tuple[str, ...] = ()
    added = read_rank_state(folder, rank, header.extra) if rank >= len(ranks) else {}
    if rank >= len(ranks) and any(ranks) and not added:
        kept = sorted({name for own in ranks for name in own})
        notes = (f"saved by {len(ranks)} ranks: rank {rank} has no saved {', '.join(kept)}",)
    return OpenedCheckpoint(
        shared=state["shared"],
        own={**state["common"], **(ranks[rank] if rank < len(ranks) else added)},
        index=index,
        header=header,
        step=header.step,
        layout=header.layout,
        extra=header.extra,
        notes=notes,
    )


def _tensor_index(content: Mapping[str, Any], data: Path) -> dict[str, IndexedTensor]:
    files = {int(rank): data / name for rank, name in content["files"].items()}
    index: dict[str, IndexedTensor] = {}
    for key, entry in content["tensors"].items():
        shape = tuple(entry["shape"])
        chunks = tuple(
            TensorChunk(
                tuple(offsets),
                tuple(sizes),
                file=files[rank],
                name=chunk_name(key, tuple(offsets), whole=tuple(sizes) == shape),
            )
            for rank, offsets, sizes in entry["chunks"]
        )
        index[key] = IndexedTensor(dtype_of(entry["dtype"]), shape, chunks)
    return index
