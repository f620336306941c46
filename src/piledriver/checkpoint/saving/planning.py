"""Plan which rank writes which chunk, by DCP: replicated tensors once, spread evenly over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from piledriver.checkpoint.saving.rank_group import RankGroup

ChunkKey = tuple[str, tuple[int, ...]]
Signature = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class GlobalPlan:
    """The plan of a save over all ranks, as this rank needs it."""

    signature: Signature
    """Keys, shapes and placements of this rank's tensors, which tell whether the plan still applies."""
    chunks: tuple[ChunkKey, ...]
    """Key and offsets of the chunks that this rank writes, at most one of each tensor."""
    index: dict[str, Any] | None
    """On rank 0: dtype, shape and chunks of every tensor, each chunk with the rank that writes it."""


def plan_save(tensors: dict[str, torch.Tensor], ranks: RankGroup, known: GlobalPlan | None = None) -> GlobalPlan:
    """Plan a save over all ranks, or return the known plan if the tensors of no rank changed."""
    signature = _signature(tensors)
    changed = ranks.all_gather(known is None or known.signature != signature)
    if known is not None and not any(changed):
        return known
    planner, local = ranks.run_checked("planning the save", lambda: _local_plan(tensors))
    plans = ranks.gather(local)
    index: dict[str, Any] | None = None
    assigned: list[tuple[ChunkKey, ...]] | None = None

    def plan_all() -> None:
        nonlocal index, assigned
        if ranks.first:
            global_plans, metadata = planner.create_global_plan(plans)
            assigned = [tuple(_chunk_key(item.index) for item in plan.items) for plan in global_plans]
            index = _index(metadata.state_dict_metadata, assigned)

    ranks.run_checked("planning the save", plan_all)
    return GlobalPlan(signature, ranks.scatter(assigned), index)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, on its device."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _signature(tensors: dict[str, torch.Tensor]) -> Signature:
    # Cheap: computed at every save while training waits.
    return tuple(
        (key, tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh)
        if isinstance(tensor, DTensor)
        else (key, tensor.shape, tensor.dtype)
        for key, tensor in tensors.items()
    )


def _local_plan(tensors: dict[str, torch.Tensor]) -> tuple[DefaultSavePlanner, SavePlan]:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), None, True)
    # A rank whose shard of a DTensor is empty (more ranks than rows) writes nothing.
    return planner, SavePlan([item for item in planner.create_local_plan().items if _has_bytes(item)])


def _index(found: dict[str, Any], assigned: list[tuple[ChunkKey, ...]]) -> dict[str, Any]:
    writer = {chunk: rank for rank, chunks in enumerate(assigned) for chunk in chunks}
    index: dict[str, Any] = {}
    for key, entry in found.items():
        assert isinstance(entry, TensorStorageMetadata)
        index[key] = {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "shape": list(entry.size),
            "chunks": [[writer[key, tuple(c.offsets)], list(c.offsets), list(c.sizes)] for c in entry.chunks],
        }
    return index


def _chunk_key(index: MetadataIndex) -> ChunkKey:
    return index.fqn, tuple(index.offset or ())


def _has_bytes(item: WriteItem) -> bool:
    assert item.tensor_data is not None
    sizes = item.tensor_data.chunk.sizes
    return torch.Size(sizes).numel() > 0 or torch.Size(item.tensor_data.size).numel() == 0
