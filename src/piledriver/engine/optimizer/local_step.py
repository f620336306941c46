"""Run elementwise optimizers on the local shards of `DTensor` parameters.

torch's `foreach` and fused steps are slow on `DTensor`s, and reject lists over several meshes (experts beside the
rest). An elementwise update is the same on local shards; its states become `DTensor`s again after each step, for
checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from piledriver.optim import capabilities
from piledriver.optim.shards import local, local_gradient


def step_locally(optimizer: torch.optim.Optimizer) -> None:
    """Make an elementwise optimizer step on the local shards of its parameters, in place."""
    sharded = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    if not capabilities(optimizer).elementwise or not sharded or "_local_step" in optimizer.__dict__:
        return
    step = LocalStep()
    optimizer.__dict__["_local_step"] = step
    optimizer.register_step_pre_hook(step.before)
    optimizer.register_step_post_hook(step.after)


class LocalStep:
    """Swaps local shards in for parameters while a step runs."""

    def __init__(self) -> None:
        self.groups: list[list[Tensor]] = []
        self.parts: dict[Tensor, Tensor] = {}

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Swap in the local shards, with their gradients and states."""
        self.groups = [group["params"] for group in optimizer.param_groups]
        self.parts = {p: _part(p) for params in self.groups for p in params if isinstance(p, DTensor)}
        for group in optimizer.param_groups:
            group["params"] = [self.parts.get(parameter, parameter) for parameter in group["params"]]
        for parameter, part in self.parts.items():
            if parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                optimizer.state[part] = {
                    key: local(value) if isinstance(value, Tensor) else value for key, value in state.items()
                }

    def after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Swap the parameters back in."""
        for group, params in zip(optimizer.param_groups, self.groups, strict=True):
            group["params"] = params
        for parameter, part in self.parts.items():
            if part in optimizer.state:
                state = optimizer.state.pop(part)
                optimizer.state[parameter] = {key: _wrapped(parameter, part, value) for key, value in state.items()}
        self.groups, self.parts = [], {}

    def __deepcopy__(self, memo: Any) -> LocalStep:
        return LocalStep()


def _part(parameter: Tensor) -> Tensor:
    part = local(parameter).detach()
    if parameter.grad is not None:
        part.grad = local_gradient(parameter).detach()
    return part


def _wrapped(parameter: Tensor, part: Tensor, value: Any) -> Any:
    """Return an elementwise state with the placements of its parameter; counters stay plain."""
    if not isinstance(value, Tensor) or value.shape != part.shape or value.dim() == 0 or value.dtype != part.dtype:
        return value
    assert isinstance(parameter, DTensor)
    # Not `from_local`, which would move what is in host memory to the device of the mesh.
    return DTensor(value, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
