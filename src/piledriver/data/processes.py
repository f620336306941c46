"""What a prepared loader asks of its process group: who am I, the same batch and the same random state everywhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from piledriver.data.nested import map_tensors, tensors_in
from piledriver.runtime.world import detect_world


def this_process() -> tuple[int, int]:
    """(index, count) of this process: of its group where there is one, else what the environment says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world = detect_world()
    return world.rank, world.size


def in_group() -> bool:
    """Whether there is anybody to talk to."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def data_process(mesh: Any) -> tuple[int, int]:
    """(index, count) among the processes that read different data: the data axes of a mesh.

    Processes that differ only along other axes (tensor, context, pipeline) read the same batches.
    """
    index, count = 0, 1
    coordinate = mesh.get_coordinate()
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name.startswith(_DATA_AXES):
            index = index * mesh.size(axis) + coordinate[axis]
            count *= mesh.size(axis)
    return index, count


_DATA_AXES = ("dp", "data", "fsdp", "zero", "replicate", "shard")


def share_batch(batch: Any, note: Any, device: torch.device | str) -> tuple[Any, Any]:
    """The main process's batch and note on every process: the structure as an object, the tensors as tensors."""
    if not in_group():
        return batch, note
    main = dist.get_rank() == 0
    message = [(map_tensors(_Outline, batch), note) if main else None]
    dist.broadcast_object_list(message, src=0)
    outline, note = message[0]  # type: ignore[misc]
    if not main:
        batch = _empty_like(outline, device)
    for tensor in tensors_in(batch):
        dist.broadcast(tensor, src=0)
    return batch, note


class _Outline:
    """Shape and type of a tensor that is yet to come."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype


def _empty_like(outline: Any, device: torch.device | str) -> Any:
    from collections.abc import Mapping

    if isinstance(outline, _Outline):
        return torch.empty(outline.shape, dtype=outline.dtype, device=device)
    if isinstance(outline, Mapping):
        return type(outline)({key: _empty_like(value, device) for key, value in outline.items()})  # type: ignore[call-arg]
    if isinstance(outline, tuple) and hasattr(outline, "_fields"):
        return type(outline)(*(_empty_like(item, device) for item in outline))
    if isinstance(outline, (list, tuple)):
        return type(outline)(_empty_like(item, device) for item in outline)
    return outline


def synchronize_generators(kinds: list[Any], generator: torch.Generator | None) -> None:
    """Give every process the main one's random state: 'torch', 'cuda', or 'generator' for the sampler's own."""
    if not in_group():
        return
    for kind in kinds:
        name = getattr(kind, "value", kind)
        if name == "torch":
            torch.set_rng_state(_from_main(torch.get_rng_state()))
        elif name == "cuda" and torch.cuda.is_available():
            torch.cuda.set_rng_state(_from_main(torch.cuda.get_rng_state()))
        elif name == "generator" and generator is not None:
            generator.set_state(_from_main(generator.get_state()))


def _from_main(state: torch.Tensor) -> torch.Tensor:
    # Through the CPU as an object: five kilobytes once an epoch, and it works with every backend.
    message = [state]
    dist.broadcast_object_list(message, src=0)
    return message[0]
