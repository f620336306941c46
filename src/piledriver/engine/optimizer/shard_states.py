"""ZeRO 1 and 2: an optimizer keeps states for this rank's shard of each parameter only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piledriver.engine.mesh import Mesh
from piledriver.engine.optimizer.parameter_map import ParameterMap, swap_parameters
from piledriver.engine.shards.owned_rows import (
    BUCKET_BYTES,
    clear_shard_gradient,
    expose_shard_gradient,
    gather_rows,
    is_optimizer_shard,
    optimizer_shard,
    shard_axis,
)
from piledriver.optim.shards import local


def shard_states(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Zero 1 and 2: let an optimizer step on this rank's shard of each parameter, then all-gather the new rows."""
    whole = [p for group in optimizer.param_groups for p in group["params"] if not is_optimizer_shard(p)]
    if not whole:
        return
    shards = ParameterMap()
    shards.replaced.update({parameter: optimizer_shard(parameter, mesh) for parameter in whole})
    swap_parameters(optimizer, shards)
    for parameter in whole:
        expose_shard_gradient(parameter)
    optimizer.register_step_pre_hook(_Before(whole))
    optimizer.register_step_post_hook(_After(whole, mesh))
    optimizer.zero_grad = _ZeroGrad(whole)  # type: ignore[method-assign]


def patch_zero_grad(model: nn.Module) -> None:
    """Make `model.zero_grad()` clear the gradients of the shards too, which are not the model's parameters."""
    model.zero_grad = _ZeroGrad(list(model.parameters()))  # type: ignore[method-assign]


class _Before:
    """Takes over gradients that were set on the parameters themselves."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def __call__(self, *_: Any) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.optimizer_shard.grad is None:  # type: ignore[attr-defined]
                expose_shard_gradient(parameter)


class _After:
    """All-gathers the updated rows, bucket by bucket."""

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh) -> None:
        """Gather all but streamed parameters, whose memory is not there after a step."""
        self.axis = mesh.shard_group
        self.buckets: list[list[nn.Parameter]] = []
        alike: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            is_streamed = local(parameter).untyped_storage().nbytes() == 0 < local(parameter).numel()
            if shard_axis(parameter, mesh) is not None and parameter.requires_grad and not is_streamed:
                alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for members in alike.values():
            self.buckets += _of_at_most(members, BUCKET_BYTES)

    def __call__(self, *_: Any) -> None:
        for bucket in self.buckets:
            gather_rows(bucket, self.axis)


class _ZeroGrad:
    """Clears the gradients of parameters and of their shards."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def __call__(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            # A view of what is being cleared, or memory of its own: dropped in both cases.
            clear_shard_gradient(parameter)
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def __deepcopy__(self, memo: Any) -> _ZeroGrad:
        return _ZeroGrad([])


def _of_at_most(parameters: list[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    buckets: list[list[nn.Parameter]] = [[]]
    size = 0
    for parameter in parameters:
        if buckets[-1] and size + local(parameter).nbytes > most_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += local(parameter).nbytes
    return buckets
