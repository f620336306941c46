"""Local shards of parameters: the tensor of this rank, its gradient, and its indices in the full parameter."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from piledriver.optim.torch_private import global_offsets


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of the local shard, redistributed to the parameter's placements first."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(parameter.device_mesh, parameter.placements)
    return local(gradient)


def like(parameter: Tensor, part: Tensor, last_dim: int | None = None) -> Tensor:
    """Return a DTensor of a local state with its parameter's placements, so that checkpoints can reshard it.

    `last_dim` is the full size of the last dimension if it differs from the parameter's.
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
    """Return the first row (index of dimension 0) of the local shard in the full parameter."""
    if not isinstance(parameter, DTensor) or not any(
        isinstance(placement, Shard) and placement.dim == 0 for placement in parameter.placements
    ):
        return 0
    return global_offsets(parameter)[0]


def whole_indices(parameter: Tensor) -> Tensor:
    """Return for each element of the local shard its flat index in the full parameter, for any sharding (int64).

    >>> whole_indices(torch.zeros(2, 3))
    tensor([[0, 1, 2],
            [3, 4, 5]])
    """
    part, offsets = local(parameter), [0] * parameter.dim()
    if isinstance(parameter, DTensor):
        offsets = global_offsets(parameter)
    index = torch.zeros((), dtype=torch.int64, device=part.device)
    stride = 1
    for dim in reversed(range(parameter.dim())):
        along = torch.arange(offsets[dim], offsets[dim] + part.shape[dim], device=part.device) * stride
        index = index + along.view(-1, *(1 for _ in range(parameter.dim() - 1 - dim)))
        stride *= parameter.shape[dim]
    return index
