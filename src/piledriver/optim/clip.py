"""Clip gradients by their global norm, also where they are sharded over several mesh and pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from piledriver.core.errors import PiledriverError
from piledriver.optim.capability import capabilities
from piledriver.optim.shards import local


class NonFiniteGradientError(PiledriverError):
    """The gradient norm is NaN or infinite, and `error_if_nonfinite` was set."""


@torch.no_grad()
def gradient_norm(parameters: Iterable[Tensor], groups: Sequence[dist.ProcessGroup] = ()) -> Tensor:
    """Return the 2-norm of all gradients in fp32, the same on every rank.

    Sharded gradients count once. `groups` are process groups whose ranks hold different parameters (pipeline stages),
    over which squares are summed.
    """
    by_mesh: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter.grad)
    norms = []
    for shared_over, gradients in by_mesh.items():
        if shared_over is None:
            norms.append(local_norm(gradients, 2.0, gradients[0].device))
            continue
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).float())
    if not norms:
        norms = [torch.zeros(())]
    square = torch.stack([norm.to(norms[0].device).square() for norm in norms]).sum()
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()


def local_norm(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of local tensors, accumulated in fp32 also for 16-bit tensors."""
    halves: dict[torch.device, list[Tensor]] = {}
    others = []
    for tensor in tensors:
        if tensor.dtype in (torch.bfloat16, torch.float16):
            halves.setdefault(tensor.device, []).append(tensor)
        else:
            others.append(tensor)
    norms = [torch.nn.utils.get_total_norm(others, norm_type)] if others else []
    for parts in halves.values():
        norms += torch._foreach_norm(parts, norm_type, dtype=torch.float32)
    if not norms:
        return torch.zeros((), device=device)
    together: Tensor = torch.linalg.vector_norm(torch.stack([one.to(device).float() for one in norms]), norm_type)
    return together


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor],
    max_norm: float,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before. Does not synchronise.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> clip_gradients([weight], 1.0), weight.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(parameters, groups)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise NonFiniteGradientError(
            f"the gradient norm is {norm.item()}", fix="lower the learning rate, or inspect the batch"
        )
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        assert parameter.grad is not None
        part = local(parameter.grad)
        by_device.setdefault(part.device, []).append(part)
    for device, parts in by_device.items():
        torch._foreach_mul_(parts, factor.to(device))
    return norm


@torch.no_grad()
def clip_in_step(
    optimizer: Optimizer, parameters: Iterable[Tensor], max_norm: float, *, groups: Sequence[dist.ProcessGroup] = ()
) -> Tensor:
    """Clip as `clip_gradients` does; an optimizer that `clips_in_step` scales gradients while it reads them."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    if not capabilities(optimizer).clips_in_step:
        return clip_gradients(parameters, max_norm, groups=groups)
    norm = gradient_norm(parameters, groups)
    cast(Any, optimizer).clip((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
