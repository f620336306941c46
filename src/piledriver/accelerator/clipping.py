"""The norm of all gradients, over every process and mesh axis that holds a part of them, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients down so that the norm of all of them together is at most `max_norm`; returns the norm before.

    Gradients that are sharded over different meshes are measured mesh by mesh and put together: the p-norm of the
    whole is the p-norm of the parts' norms.
    """
    held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    grads = [parameter.grad for parameter in held if parameter.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    total = total_norm(grads, norm_type)
    for group in _by_mesh(grads).values():
        local = [parameter for parameter in held if any(parameter.grad is grad for grad in group)]
        nn.utils.clip_grads_with_norm_(local, max_norm, total.to(group[0].device))
    return total


def total_norm(grads: list[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients as one vector.

    >>> total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5.)
    """
    norms = [_whole(nn.utils.get_total_norm(group, norm_type)) for group in _by_mesh(grads).values()]
    if len(norms) == 1:
        return norms[0]
    together: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type
    )
    return together


def _by_mesh(grads: list[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    groups: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        groups.setdefault(key, []).append(grad)
    return groups


def _whole(norm: torch.Tensor) -> torch.Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
