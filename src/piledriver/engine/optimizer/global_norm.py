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

from piledriver.engine.errors import EngineError
from piledriver.engine.mesh import Mesh
from piledriver.engine.offload import measured_norm
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
    tensors = optimizer_tensors(parameters)
    measured = [tensor for tensor in tensors if tensor.grad is None and measured_norm(tensor) is not None]
    held = [parameter for parameter in tensors if parameter.grad is not None]
    total = total_norm([one for one in tensors if one.grad is not None or one in set(measured)], norm_type, mesh)
    for tensor in measured:
        # Scaled when they arrive again.
        tensor.master_weight.stepper.factor = _clip_factor(max_norm, total)  # type: ignore[attr-defined]
    for device, parts in _by_device(
        [local(parameter.grad) for parameter in held if parameter.grad is not None]
    ).items():
        torch._foreach_mul_(parts, _clip_factor(max_norm, total.to(device)))
    return total


def _clip_factor(max_norm: float, total: Tensor) -> Tensor:
    return (max_norm / (total + 1e-6)).clamp(max=1.0)


@torch.no_grad()
def total_norm(parameters: list[Tensor], norm_type: float = 2.0, mesh: Mesh | None = None) -> Tensor:
    """Return the norm of all gradients as one vector, the same on every rank.

    Local norms are reduced over the axes that shard a gradient. A weight tied across stages counts on its owner only.
    """
    infinite = math.isinf(norm_type)
    groups: dict[Any, list[Tensor]] = {}
    known: dict[int, Tensor] = {}
    for parameter in parameters:
        norm = measured_norm(parameter) if parameter.grad is None else None
        gradient, key = _local_gradient(parameter) if norm is None else (norm, _shard_dims(parameter))
        if norm is not None:
            known[id(gradient)] = norm
        groups.setdefault(key, []).append(gradient)
    if known and norm_type != 2.0:
        raise EngineError(f"norm_type is {norm_type} where blocks step in the backward", fix="use norm_type=2")
    device = local(parameters[0]).device if parameters else torch.device("cpu" if mesh is None else mesh.device_type)
    total = torch.zeros((), device=device)
    for key in sorted(groups, key=str):
        # A rank may hold no rows of a parameter, and an empty tensor has no maximum.
        held = [gradient for gradient in groups[key] if gradient.numel()]
        norm = _norm_of_norms(held, known, device) if known else local_norm(held, norm_type, device)
        part = norm if infinite else norm**norm_type
        device_mesh, dims = key
        for dim in dims:
            _all_reduce(part, device_mesh.get_group(dim), infinite)
        total = torch.maximum(total, part) if infinite else total + part
    if mesh is not None and not mesh.alone and mesh.layout.pp > 1:
        _all_reduce(total, mesh.pp.get_group(), infinite)
    return total if infinite else total ** (1.0 / norm_type)


def _norm_of_norms(tensors: list[Tensor], known: dict[int, Tensor], device: torch.device) -> Tensor:
    """Return the 2-norm of gradients, some of which are given by their norms."""
    norms = [known[id(one)] if id(one) in known else local_norm([one], 2.0, device) for one in tensors]
    found: Tensor = torch.linalg.vector_norm(torch.stack([one.to(device).float() for one in norms]), 2.0)
    return found


def _shard_dims(tensor: Tensor) -> tuple[Any, tuple[int, ...]]:
    """Return the mesh of a tensor and the dimensions of it that shard the tensor."""
    if not isinstance(tensor, DTensor):
        return None, ()
    dims = tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())
    return tensor.device_mesh if dims else None, dims


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
    return gradient.to_local(), _shard_dims(gradient)


def _all_reduce(number: Tensor, group: Any, infinite: bool) -> None:
    dist.all_reduce(number, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)


def _by_device(tensors: list[Tensor]) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return found
