"""Stochastic rounding: compute an optimizer's update in fp32 and round it to bf16 weights at random.

Updates are often smaller than half the spacing of bf16: rounding to nearest would lose them, stochastic rounding keeps
them in expectation. The noise is a hash of (seed, step, parameter name, global index), so a resumed run or another
layout rounds the same way.

The optimizer steps on fp32 copies, one bucket of parameters at a time; its states are fp32. `CompactAdamW` rounds in
its own kernel and keeps smaller states.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from piledriver.core.random import Stream
from piledriver.kernels.rounding import NOISE_STRIDE, hash_bits, round_to_bf16
from piledriver.optim import capabilities
from piledriver.optim.shards import local, local_gradient, whole_indices

BUCKET_ELEMENTS = 1 << 26


def assign_noise_ids(model: nn.Module) -> None:
    """Give each parameter a noise id derived from its name, independent of the other parameters."""
    for name, parameter in model.named_parameters():
        number = Stream(0, "parameter", name).below(2**31, 0)
        for one in (parameter, getattr(parameter, "optimizer_shard", None)):
            if isinstance(one, Tensor):
                one.noise_id = number  # type: ignore[attr-defined]


def round_stochastically(optimizer: Optimizer, *, seed: int = 0) -> None:
    """Make an optimizer update bf16 parameters with stochastic rounding, in place; groups and state dict stay."""
    if capabilities(optimizer).rounds_bf16:
        return
    if not any(_is_small(parameter) for parameter in _parameters(optimizer)):
        return
    raw = inspect.unwrap(type(optimizer).step)

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # torch's schedulers check this.
        self._opt_called = True  # type: ignore[attr-defined]
        with torch.no_grad():
            _step(self, raw, seed)
        return loss

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked._wrapped_by_lr_sched = True
    optimizer.step = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]
    # The replaced step counts on the host, so it cannot skip by a flag on the device.
    optimizer.__dict__.update(rounds_bf16=True, skips_on_device=False)
    for group in optimizer.param_groups:
        group.setdefault("rounding_step", 0)
    dtypes = _KeepDtypes()
    optimizer.register_load_state_dict_pre_hook(dtypes.before)
    optimizer.register_load_state_dict_post_hook(dtypes.after)


def _step(optimizer: Optimizer, raw: Callable[[Optimizer], Any], seed: int) -> None:
    groups = [list(group["params"]) for group in optimizer.param_groups]
    number = 1 + optimizer.param_groups[0]["rounding_step"]
    salt = Stream(seed, "rounding", number).below(2**31, 0)
    positions = {parameter: position for position, parameter in enumerate(_parameters(optimizer))}
    try:
        for bucket in _buckets(optimizer):
            stand_ins = {parameter: _stand_in(parameter) for parameter in bucket if _is_small(parameter)}
            for group, members in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = [stand_ins.get(one, one) for one in members if one in bucket]
            for parameter, stand_in in stand_ins.items():
                if parameter in optimizer.state:
                    optimizer.state[stand_in] = optimizer.state.pop(parameter)
            raw(optimizer)
            for parameter, stand_in in stand_ins.items():
                optimizer.state[parameter] = optimizer.state.pop(stand_in, {})
                apart = getattr(parameter, "noise_id", NOISE_STRIDE * positions[parameter])
                _round_into(parameter, stand_in, salt + apart)
    finally:
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = members
    for group in optimizer.param_groups:
        group["rounding_step"] = number


def _buckets(optimizer: Optimizer) -> Iterator[set[Tensor]]:
    due = [parameter for parameter in _parameters(optimizer) if parameter.grad is not None]
    if not capabilities(optimizer).per_parameter:
        yield set(due)
        return
    bucket: set[Tensor] = set()
    size = 0
    for parameter in due:
        if bucket and size + local(parameter).numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, size = set(), 0
        bucket.add(parameter)
        size += local(parameter).numel()
    yield bucket


def _stand_in(parameter: Tensor) -> Tensor:
    made = parameter.detach().float().requires_grad_()
    gradient = local_gradient(parameter).float()
    made.grad = DTensor(gradient, made._spec, requires_grad=False) if isinstance(made, DTensor) else gradient  # type: ignore[no-untyped-call]
    return made


def _round_into(parameter: Tensor, stand_in: Tensor, salt: int) -> None:
    part = local(parameter)
    if part.numel():
        bits = hash_bits(whole_indices(parameter), salt)
        part.copy_(round_to_bf16(local(stand_in).detach(), bits))


def _is_small(parameter: Tensor) -> bool:
    return parameter.dtype == torch.bfloat16


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _KeepDtypes:
    """Keeps the dtype of loaded states, which torch's `load_state_dict` casts to that of their parameter."""

    def __init__(self) -> None:
        self.saved: dict[Any, dict[str, Any]] = {}

    def before(self, _: Optimizer, state_dict: dict[str, Any]) -> None:
        """Keep the states to be loaded."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        self.saved = {place: state_dict["state"].get(number, {}) for place, number in enumerate(numbers)}

    def after(self, optimizer: Optimizer) -> None:
        """Restore the states that torch cast."""
        for place, parameter in enumerate(_parameters(optimizer)):
            for key, value in self.saved.get(place, {}).items():
                now = optimizer.state[parameter].get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.detach().clone().to(now.device)
        self.saved = {}
