"""The global gradient norm over all shards and pipeline stages, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from piledriver.engine.mesh import Mesh
from piledriver.engine.shards.owned_rows import optimizer_tensors
from piledriver.optim.clip import local_norm
from piledriver.optim.shards import local


@torch.no_grad()
def clip_sharded_grad_norm(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0, mesh: Mesh | None = None
) -> Tensor:
    """Scale gradients so that their global norm is at most `max_norm`; return the norm before.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_sharded_grad_norm([weight], 1.0), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    held = [parameter for parameter in optimizer_tensors(parameters) if parameter.grad is not None]
    total = total_norm(held, norm_type, mesh)
    for device, parts in _by_device(
        [local(parameter.grad) for parameter in held if parameter.grad is not None]
    ).items():
        factor = (max_norm / (total.to(device) + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(parts, factor)
    return total


@torch.no_grad()
def total_norm(parameters: list[Tensor], norm_type: float = 2.0, mesh: Mesh | None = None) -> Tensor:
    """Return the norm of all gradients as one vector, the same on every rank.

    Local norms are reduced over the axes that shard a gradient. A weight tied across stages counts on its owner only.
    """
    infinite = math.isinf(norm_type)
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        gradient, key = _local_gradient(parameter)
        groups.setdefault(key, []).append(gradient)
    device = local(parameters[0]).device if parameters else torch.device("cpu" if mesh is None else mesh.device_type)
    total = torch.zeros((), device=device)
    for key in sorted(groups, key=str):
        # A rank may hold no rows of a parameter, and an empty tensor has no maximum.
        held = [gradient for gradient in groups[key] if gradient.numel()]
        norm = local_norm(held, norm_type, device)
        part = norm if infinite else norm**norm_type
        device_mesh, dims = key
        for dim in dims:
            _all_reduce(part, device_mesh.get_group(dim), infinite)
        total = torch.maximum(total, part) if infinite else total + part
    if mesh is not None and not mesh.alone and mesh.layout.pp > 1:
        _all_reduce(total, mesh.pp.get_group(), infinite)
    return total if infinite else total ** (1.0 / norm_type)


def _local_gradient(parameter: Tensor) -> tuple[Tensor, tuple[Any, tuple[int, ...]]]:
    """Return the local gradient, and the mesh dimensions that shard it."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient, (None, ())
    if any(placement.is_partial() for placement in gradient.placements):
        wanted: list[Placement] = [Replicate() if one.is_partial() else one for one in gradient.placements]
        gradient = gradient.redistribute(placements=wanted)
        parameter.grad = gradient
    dims = tuple(dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return gradient.to_local(), (gradient.device_mesh if dims else None, dims)


def _all_reduce(number: Tensor, group: Any, infinite: bool) -> None:
    dist.all_reduce(number, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found
