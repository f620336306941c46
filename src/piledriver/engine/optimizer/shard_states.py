"""An optimizer made for the plain model follows the laid-out one: same groups, the parameters that took their place."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from piledriver.engine.mesh import Mesh
from piledriver.engine.shards import owned_rows as parts
from piledriver.engine.shards.owned_rows import BUCKET_BYTES


def swap_parameters(
    optimizer: torch.optim.Optimizer, replaced: Mapping[Tensor, Tensor], gone: Container[Tensor] = ()
) -> None:
    """Put each new parameter where the old one was, with its state where there is one already.

    `gone` are those that other pipeline stages hold.
    """
    for group in optimizer.param_groups:
        held = [parameter for parameter in group["params"] if parameter not in gone]
        group["params"] = [replaced.get(parameter, parameter) for parameter in held]
    for old in [known for known in optimizer.state if known in gone]:
        del optimizer.state[old]
    for old in [known for known in optimizer.state if known in replaced]:
        new, state = replaced[old], optimizer.state.pop(old)
        optimizer.state[new] = {key: _laid_out_like(new, old, value) for key, value in state.items()}


def _laid_out_like(new: Tensor, old: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(new, DTensor):
        return value
    if value.shape != old.shape or value.dim() == 0:
        return value
    return distribute_tensor(value, new.device_mesh, new.placements, src_data_rank=None)


def shard_states(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    """Zero 1 and 2: step on this process's rows only, then bring everybody's new rows together."""
    whole = [p for group in optimizer.param_groups for p in group["params"] if not parts.is_optimizer_shard(p)]
    if not whole:
        return
    replaced = {parameter: parts.optimizer_shard(parameter, mesh) for parameter in whole}
    swap_parameters(optimizer, replaced)
    for parameter in whole:
        parts.expose_shard_gradient(parameter)
    optimizer.register_step_pre_hook(_Before(whole))
    optimizer.register_step_post_hook(_After(whole, mesh))
    optimizer.zero_grad = _ZeroGrad(whole)  # type: ignore[method-assign]


def patch_zero_grad(model: nn.Module) -> None:
    """`model.zero_grad()` clears the gradients of the own rows too, which are not the model's parameters."""
    model.zero_grad = _ZeroGrad(list(model.parameters()))  # type: ignore[method-assign]


class _Before:
    """What was cleared on the model is cleared here; what was set by hand is seen."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def __call__(self, *_: Any) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.optimizer_shard.grad is None:  # type: ignore[attr-defined]
                parts.expose_shard_gradient(parameter)


class _After:
    """Everybody's new rows, bucket by bucket."""

    def __init__(self, parameters: list[nn.Parameter], mesh: Mesh) -> None:
        self.axis = mesh.shard_group
        self.buckets: list[list[nn.Parameter]] = []
        alike: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            if parts.shard_axis(parameter, mesh) is not None and parameter.requires_grad:
                alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for members in alike.values():
            self.buckets += _of_at_most(members, BUCKET_BYTES)

    def __call__(self, *_: Any) -> None:
        for bucket in self.buckets:
            parts.gather_rows(bucket, self.axis)


class _ZeroGrad:
    """Clears the whole gradients together with those of the rows."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def __call__(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            # A view of what is being cleared, or rows of their own: gone in both cases.
            parts.clear_shard_gradient(parameter)
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
        if buckets[-1] and size + parts.local(parameter).nbytes > most_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parts.local(parameter).nbytes
    return buckets
