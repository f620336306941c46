"""Leaving a step out on the device, so that the host need not wait to know whether the step is to be taken.

The door is the one that torch's gradient scaler uses: `optimizer.found_inf`, a float32 number on the device. Where it
is 1 the step changes nothing: no weight, no state, no counter. torch's fused optimizers honour it, and so do ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piledriver.optim.shards import local

_DEVICES = ("cuda", "cpu")


def can_leave_out(optimizer: Any, device: torch.device) -> bool:
    """Whether an optimizer honours a verdict that lies on this device; others have to be waited for.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> cpu = torch.device("cpu")
    >>> [can_leave_out(torch.optim.AdamW([weight], fused=fused), cpu) for fused in (True, False)]
    [True, False]
    """
    optimizer = _inner(optimizer)
    # Somebody else's step around the optimizer's own (the engine's stochastic rounding) counts steps on the host.
    wrapped = getattr(optimizer.step, "_rounds", False) and not getattr(type(optimizer).step, "_rounds", False)
    knows = getattr(optimizer, "leaves_out_on_device", False) or getattr(optimizer, "_step_supports_amp_scaling", False)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    here = device.type in _DEVICES and all(local(parameter).device == device for parameter in parameters)
    return bool(knows and here and not wrapped)


def step_unless(left_out: Tensor, optimizer: Any) -> None:
    """One step, which changes nothing where `left_out` (a boolean on the device) is true. Nobody waits."""
    inner = _inner(optimizer)
    inner.found_inf, inner.grad_scale = left_out.float(), None
    try:
        optimizer.step()
    finally:
        del inner.found_inf, inner.grad_scale


def verdict_of(optimizer: Any) -> Tensor | None:
    """What a step of ours has to honour: true on the device where it is left out; None where nothing was said."""
    found = getattr(optimizer, "found_inf", None)
    return None if found is None else found != 0


def put(old: Tensor, new: Tensor, left_out: Tensor | None) -> None:
    """Write new numbers over the old ones, unless the step is left out. What is no number does not get through."""
    old.copy_(new if left_out is None else torch.where(left_out, old, new))


def with_closure(closure: Callable[[], Any] | None) -> Any:
    """What every optimizer's step begins with."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _inner(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)
