"""Process group of a prepared loader: this rank, and broadcast of a batch from the main process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from piledriver.runtime.collectives.nested import map_tensors, tensors
from piledriver.runtime.collectives.operations import broadcast_object
from piledriver.runtime.world import current_world, group_world

# Prefixes of mesh axes along which ranks read different data.
_DATA_AXES = ("dp", "data", "fsdp", "zero", "replicate", "shard")


def current_rank() -> tuple[int, int]:
    """Return (rank, world size): of the process group if there is one, else from the environment."""
    world = group_world() if dist.is_initialized() else current_world()
    return world.rank, world.size


def data_parallel_rank(mesh: Any) -> tuple[int, int]:
    """Return (rank, size) over the data axes of a mesh.

    Ranks that differ only along other axes (tensor, context, pipeline) read the same batches.
    """
    index, count = 0, 1
    coordinate = mesh.get_coordinate()
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name.startswith(_DATA_AXES):
            index = index * mesh.size(axis) + coordinate[axis]
            count *= mesh.size(axis)
    return index, count


def broadcast_batch(batch: Any, note: Any, device: torch.device | str) -> tuple[Any, Any]:
    """Return the main process's batch and note on every rank. The structure travels as an object, tensors as such."""
    world = group_world(device)
    if not world.is_distributed:
        return batch, note
    outline, note = broadcast_object(world, (map_tensors(_TensorShape, batch), note) if world.is_main else None)
    if world.is_main:
        batch = map_tensors(torch.Tensor.contiguous, batch)
    else:
        batch = map_tensors(lambda slot: slot.empty(device), outline, test=lambda leaf: isinstance(leaf, _TensorShape))
    for tensor in tensors(batch):
        dist.broadcast(tensor, src=0)
    return batch, note


class _TensorShape:
    """Shape and dtype of a tensor to receive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype

    def empty(self, device: torch.device | str) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)
