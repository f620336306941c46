"""Which rank writes which piece: DCP's plan over all ranks, each replicated tensor once, spread evenly."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from piledriver.checkpoint.ranks import Ranks

Box = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """The plan that all ranks agreed on."""

    local_digest: str
    """Of this rank's own tensors, to notice when a plan no longer fits."""
    mine: tuple[Box, ...]
    """What this rank writes: key and offsets."""
    index: dict[str, Any] | None
    """On the first rank: every tensor with its dtype, shape and boxes, each with the rank that writes it."""


def agree(tensors: dict[str, torch.Tensor], ranks: Ranks, known: SharedPlan | None) -> tuple[SharedPlan, Boxes]:
    """Plan a save over all ranks, or take the known plan again where no rank's tensors changed."""
    boxes = Boxes(tensors)
    changed = ranks.shared(known is None or known.local_digest != boxes.digest)
    if known is not None and not any(changed):
        return known, boxes
    plans = ranks.gathered(boxes.plan)
    index: dict[str, Any] | None = None
    handed: list[tuple[Box, ...]] | None = None
    problem: Exception | None = None
    if ranks.first:
        try:
            global_plans, metadata = boxes.planner.create_global_plan(plans)
            handed = [tuple(_box(item.index) for item in plan.items) for plan in global_plans]
            index = _index(metadata.state_dict_metadata, handed)
        except Exception as error:
            problem, handed = error, [()] * ranks.size

    def report() -> None:
        if problem is not None:
            raise problem

    mine = ranks.handed(handed)
    ranks.together("planning the save", report)
    return SharedPlan(boxes.digest, mine, index), boxes


class Boxes:
    """This rank's tensors as the boxes that DCP's planner makes of them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.planner.set_up_planner(dict(tensors), None, True)
        # A rank whose part of a DTensor is empty (more ranks than rows) has nothing to write.
        items = [item for item in self.planner.create_local_plan().items if _has_bytes(item)]
        self.plan = SavePlan(items)
        self._items = {_box(item.index): item for item in items}
        described = repr([(_box(item.index), _shape(item), str(_dtype(item))) for item in items])
        self.digest = hashlib.sha256(described.encode()).hexdigest()

    def data(self, box: Box) -> torch.Tensor:
        """This rank's tensor for a box, still on its device."""
        found = self.planner.resolve_data(self._items[box])
        assert isinstance(found, torch.Tensor)
        return found.detach()


def name_in_file(key: str, offsets: tuple[int, ...], whole: bool) -> str:
    """The name of a box inside its file: the key itself where the box is the whole tensor.

    >>> name_in_file("fc.weight", (4, 0), whole=False)
    'fc.weight@4,0'
    """
    return key if whole else f"{key}@{','.join(map(str, offsets))}"


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


def _shape(item: WriteItem) -> tuple[int, ...]:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.size)


def _dtype(item: WriteItem) -> torch.dtype:
    assert item.tensor_data is not None
    return item.tensor_data.properties.dtype


def _has_bytes(item: WriteItem) -> bool:
    assert item.tensor_data is not None
    sizes = item.tensor_data.chunk.sizes
    return torch.Size(sizes).numel() > 0 or torch.Size(item.tensor_data.size).numel() == 0
