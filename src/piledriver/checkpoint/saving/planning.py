"""Which rank writes which piece: DCP's plan over all ranks, each replicated tensor once, spread evenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from piledriver.checkpoint.saving.group import Ranks

Box = tuple[str, tuple[int, ...]]
Signature = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """The plan that all ranks agreed on."""

    signature: Signature
    """Of this rank's own tensors, to notice when a plan no longer fits."""
    mine: tuple[Box, ...]
    """What this rank writes: key and offsets. A rank has one box of a tensor at most."""
    index: dict[str, Any] | None
    """On the first rank: every tensor with its dtype, shape and boxes, each with the rank that writes it."""


def agree(tensors: dict[str, torch.Tensor], ranks: Ranks, known: SharedPlan | None = None) -> SharedPlan:
    """Plan a save over all ranks, or take the known plan again where no rank's tensors changed."""
    signature = _signature(tensors)
    changed = ranks.shared(known is None or known.signature != signature)
    if known is not None and not any(changed):
        return known
    planner, local = ranks.together("planning the save", lambda: _local_plan(tensors))
    plans = ranks.gathered(local)
    index: dict[str, Any] | None = None
    handed: list[tuple[Box, ...]] | None = None

    def plan_all() -> None:
        nonlocal index, handed
        if ranks.first:
            global_plans, metadata = planner.create_global_plan(plans)
            handed = [tuple(_box(item.index) for item in plan.items) for plan in global_plans]
            index = _index(metadata.state_dict_metadata, handed)

    ranks.together("planning the save", plan_all)
    return SharedPlan(signature, ranks.handed(handed), index)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, still on its device."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _signature(tensors: dict[str, torch.Tensor]) -> Signature:
    # Cheap, because it is taken at every save while the training waits.
    return tuple(
        (key, tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh)
        if isinstance(tensor, DTensor)
        else (key, tensor.shape, tensor.dtype)
        for key, tensor in tensors.items()
    )


def _local_plan(tensors: dict[str, torch.Tensor]) -> tuple[DefaultSavePlanner, SavePlan]:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), None, True)
    # A rank whose part of a DTensor is empty (more ranks than rows) has nothing to write.
    return planner, SavePlan([item for item in planner.create_local_plan().items if _has_bytes(item)])


def _index(found: dict[str, Any], handed: list[tuple[Box, ...]]) -> dict[str, Any]:
    writer = {box: rank for rank, boxes in enumerate(handed) for box in boxes}
    index: dict[str, Any] = {}
    for key, entry in found.items():
        assert isinstance(entry, TensorStorageMetadata)
        index[key] = {
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "shape": list(entry.size),
            "chunks": [[writer[key, tuple(c.offsets)], list(c.offsets), list(c.sizes)] for c in entry.chunks],
        }
    return index


def _box(index: MetadataIndex) -> Box:
    return index.fqn, tuple(index.offset or ())


def _has_bytes(item: WriteItem) -> bool:
    assert item.tensor_data is not None
    sizes = item.tensor_data.chunk.sizes
    return torch.Size(sizes).numel() > 0 or torch.Size(item.tensor_data.size).numel() == 0
