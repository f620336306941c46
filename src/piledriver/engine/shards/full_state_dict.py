"""Gather the weights of a sharded model: all at once on every rank, or one tensor at a time on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.engine.mesh import Mesh
from piledriver.engine.shards.tied_parameters import add_tied_keys


@torch.no_grad()
def full_state_dict(model: nn.Module, mesh: Mesh) -> dict[str, Any]:
    """Return the full state dict on every rank, gathered tensors in host memory. Collective."""
    state = {
        key: _gathered(value).cpu() if isinstance(value, DTensor) else value
        for key, value in model.state_dict().items()
    }
    if mesh.alone or mesh.layout.pp == 1:
        return state
    stages: list[Any] = [None] * mesh.pp.size()
    dist.all_gather_object(stages, state, group=mesh.pp.get_group())
    joined: dict[str, Any] = {}
    for stage in stages:
        joined |= {key: value for key, value in stage.items() if key not in joined}
    return add_tied_keys(model, joined)


@torch.no_grad()
def full_tensors(model: nn.Module, mesh: Mesh) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name, tensor) of the state dict one at a time: whole and in host memory on rank 0, None on other ranks.

    Collective: every rank iterates to the end. No rank holds more than one gathered tensor, so that a model larger than
    any rank's memory can be written to files.
    """
    state = {key: value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    if mesh.alone or mesh.layout.pp == 1:
        is_first = mesh.alone or dist.get_rank() == 0
        for name, tensor in state.items():
            whole = _gathered(tensor)
            yield name, whole.cpu() if is_first else None
        return
    yield from _from_stages(state, mesh)


def _from_stages(state: dict[str, Tensor], mesh: Mesh) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the tensors of pipeline stages: the ranks of a stage gather, and one of them sends to rank 0."""
    group, stage, rank = mesh.pp.get_group(), mesh.pp.get_local_rank(), dist.get_rank()
    ranks = dist.get_process_group_ranks(group)
    held: list[Any] = [None] * len(ranks)
    dist.all_gather_object(held, {name: (one.shape, one.dtype) for name, one in state.items()}, group=group)
    owners = {name: (owner, *about) for owner, names in reversed([*enumerate(held)]) for name, about in names.items()}
    for name, (owner, shape, dtype) in owners.items():
        whole = _gathered(state[name]) if owner == stage else None
        if owner and rank == ranks[owner] and ranks[0] == 0:
            assert whole is not None
            dist.send(whole.contiguous(), 0, group=group)
        elif owner and rank == 0:
            whole = torch.empty(shape, dtype=dtype, device=mesh.device_type)
            dist.recv(whole, ranks[owner], group=group)
        yield name, whole.cpu() if whole is not None and rank == 0 else None


def _gathered(tensor: Tensor) -> Tensor:
    """Return the full tensor on its mesh's device: collectives do not reach shards offloaded to the host."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    here = cast(DTensor, tensor.to(tensor.device_mesh.device_type))
    return here.full_tensor().detach()
