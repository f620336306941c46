"""What an elementwise optimizer needs of a parameter that may be sharded: its local part, and where that part lies."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local(tensor: Tensor) -> Tensor:
    """The part of this process, sharing memory with the whole; the tensor itself where it is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """The gradient of the local part, first laid out as its parameter is."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local(gradient)


def like(parameter: Tensor, part: Tensor, last_dim: int | None = None) -> Tensor:
    """Wrap a local tensor as its parameter is distributed, so that checkpoints can reshard it.

    `last_dim` is the whole size of the last dimension where it differs from the parameter's.
    """
    if not isinstance(parameter, DTensor):
        return part
    shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] if last_dim is None else last_dim))
    stride = torch.empty(shape, device="meta").stride()
    return cast(
        Tensor,
        DTensor.from_local(
            part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
        ),
    )


def first_row(parameter: Tensor) -> int:
    """The row of the whole parameter at which the local part begins (rows are what the first dimension counts)."""
    if not isinstance(parameter, DTensor) or not any(
        isinstance(placement, Shard) and placement.dim == 0 for placement in parameter.placements
    ):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return int(offsets[0])


def whole_indices(parameter: Tensor) -> Tensor:
    """For each element of the local part, its index in the whole parameter, however that is sharded (int64).

    >>> whole_indices(torch.zeros(2, 3))
    tensor([[0, 1, 2],
            [3, 4, 5]])
    """
    part, offsets = local(parameter), [0] * parameter.dim()
    if isinstance(parameter, DTensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, begins = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        offsets = list(begins)
    index = torch.zeros((), dtype=torch.int64, device=part.device)
    stride = 1
    for dim in reversed(range(parameter.dim())):
        along = torch.arange(offsets[dim], offsets[dim] + part.shape[dim], device=part.device) * stride
        index = index + along.view(-1, *(1 for _ in range(parameter.dim() - 1 - dim)))
        stride *= parameter.shape[dim]
    return index
