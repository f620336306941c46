"""Skip an optimizer step on the device, without a host synchronisation.

As in torch's gradient scaler, the flag is `optimizer.found_inf`, a float32 scalar on the device. Where it is 1, a step
changes no weight, state or counter. torch's fused optimizers honour it, and so do ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piledriver.optim.capability import capabilities, inner_optimizer
from piledriver.optim.shards import local

_DEVICES = ("cuda", "cpu")


def can_skip_on_device(optimizer: Any, device: torch.device) -> bool:
    """Return whether an optimizer honours a skip flag on this device; for others the host has to read the flag first.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> cpu = torch.device("cpu")
    >>> [can_skip_on_device(torch.optim.AdamW([weight], fused=fused), cpu) for fused in (True, False)]
    [True, False]
    """
    parameters = [parameter for group in inner_optimizer(optimizer).param_groups for parameter in group["params"]]
    here = device.type in _DEVICES and all(local(parameter).device == device for parameter in parameters)
    return here and capabilities(optimizer).skips_on_device


def step_unless(skip: Tensor, optimizer: Any) -> None:
    """Step an optimizer, except where `skip` (a boolean on the device) is true. Does not synchronise."""
    inner = inner_optimizer(optimizer)
    inner.found_inf, inner.grad_scale = skip.float(), None
    try:
        optimizer.step()
    finally:
        del inner.found_inf, inner.grad_scale


def skip_flag(optimizer: Any) -> Tensor | None:
    """Return the boolean on the device that tells the current step of one of our optimizers to skip, or None."""
    found = getattr(optimizer, "found_inf", None)
    return None if found is None else found != 0


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Return the loss of a closure given to `step`, computed with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
