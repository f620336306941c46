"""Replace an optimizer's `step` by one that goes block by block; groups, hooks and state dict stay."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from piledriver.engine.offload.master import MasterWeight
from piledriver.engine.offload.stepping.backward_step import BackwardStep
from piledriver.engine.offload.stepping.block_step import BlockStep

_NAME = "_block_step"


def step_by_block(optimizer: Optimizer, masters: list[MasterWeight], homes: list[Any]) -> None:
    """Make an optimizer step on master weights block by block, in place; call it again for more of them."""
    tiers = homes[0].tiers
    stepper: BlockStep | None = optimizer.__dict__.get(_NAME)
    if stepper is None:
        stepper = (BackwardStep if tiers.gradients == "step" else BlockStep)(optimizer, tiers)
        optimizer.__dict__[_NAME] = stepper
        _replace_step(optimizer, stepper, homes)
    stepper.reserve()
    if isinstance(stepper, BackwardStep):
        for master in masters:
            master.stepper = stepper


def _replace_step(optimizer: Optimizer, stepper: BlockStep, homes: list[Any]) -> None:
    def settle() -> None:
        for home in homes:
            home.gradients.settle()

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None and isinstance(stepper, BackwardStep):
            loss = stepper.step_twice(closure, settle)
        elif closure is not None:
            with torch.enable_grad():
                loss = closure()
            settle()
        # torch's schedulers check this.
        self._opt_called = True  # type: ignore[attr-defined]
        for home in homes:
            # A forward without a backward may have left blocks on the device.
            home.evict()
        stepper.step()
        for home in homes:
            home.finish_step()
        return loss

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked._wrapped_by_lr_sched = True
    optimizer.step = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]
