"""torch's elementwise optimizers on sharded parameters run on the local parts: the same numbers, as fast as plain.

Given DTensors, torch leaves its fast paths and goes operator by operator, and the fast ones refuse lists with parts on
several mesh (experts beside the rest). An update that looks at one element at a time needs to know nothing of other
processes: it is run on this process's parts, and what it keeps is a DTensor again between the steps, for checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from piledriver.optim import capabilities
from piledriver.optim.shards import local, local_gradient


def step_locally(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step on the local parts of its parameters, where each element is on its own; in place."""
    sharded = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    if not capabilities(optimizer).elementwise or not sharded or "_local_step" in optimizer.__dict__:
        return
    step = LocalStep()
    optimizer.__dict__["_local_step"] = step
    optimizer.register_step_pre_hook(step.before)
    optimizer.register_step_post_hook(step.after)


class LocalStep:
    """Puts local parts in the place of parameters while a step runs."""

    def __init__(self) -> None:
        self.groups: list[list[Tensor]] = []
        self.parts: dict[Tensor, Tensor] = {}

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Parameters out, parts in, with their gradients and states."""
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
        """And back."""
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
    """A state that has an entry for each element is laid out as its parameter; counters stay plain."""
    if not isinstance(value, Tensor) or value.shape != part.shape or value.dim() == 0 or value.dtype != part.dtype:
        return value
    assert isinstance(parameter, DTensor)
    # Not `from_local`, which would move what is in host memory to the device of the mesh.
    return DTensor(value, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
