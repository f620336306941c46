"""Capabilities: what the engine and the training loop may do with an optimizer.

An optimizer states each capability as a class attribute of the same name. torch's classes cannot carry our attributes:
the table below holds theirs.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from piledriver.optim.torch_private import supports_found_inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an optimizer can do. An optimizer that declares nothing steps on whole parameters, all at once."""

    elementwise: bool = False
    """The update of an element reads that element only: a step may run on local shards in place of parameters."""
    per_parameter: bool = False
    """The update of a parameter reads that parameter only: a step may run on some parameters at a time."""
    rounds_bf16: bool = False
    """Updates bf16 weights without losing small changes: stochastic rounding, or the rest of each weight as a state."""
    clips_in_step: bool = False
    """Has `clip(factor)`: the next step scales gradients by this tensor while it reads them."""
    skips_on_device: bool = False
    """Honours `optimizer.found_inf`: where that tensor is 1, a step changes no weight, state or counter."""
    needs_full_parameters: bool = False
    """The update reads rows and columns of full matrices: the engine rejects layouts that shard parameters."""


_ELEMENTWISE_NAMES = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD")
_TORCH: dict[type, Capabilities] = {
    **{getattr(torch.optim, name): Capabilities(elementwise=True) for name in _ELEMENTWISE_NAMES},
    torch.optim.Adafactor: Capabilities(needs_full_parameters=True),
    torch.optim.LBFGS: Capabilities(needs_full_parameters=True),
}


def capabilities(optimizer: Any) -> Capabilities:
    """Return what an optimizer can do: its attributes, or those of the torch class whose `step` it runs.

    An attribute of the instance overrides its class: the engine sets one where it replaces the step.

    >>> from piledriver.optim import Lion
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> capabilities(Lion([weight])).elementwise, capabilities(torch.optim.LBFGS([weight])).elementwise
    (True, False)
    """
    optimizer = inner_optimizer(optimizer)
    known = _torch_capabilities(type(optimizer))
    found = {field.name: getattr(optimizer, field.name, getattr(known, field.name)) for field in _FIELDS}
    if not hasattr(optimizer, "skips_on_device"):
        found["skips_on_device"] = supports_found_inf(optimizer)
    return Capabilities(**{**found, "per_parameter": found["per_parameter"] or found["elementwise"]})


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside a wrapper with an `optimizer` attribute (such as a prepared one), or itself."""
    return getattr(optimizer, "optimizer", optimizer)


_FIELDS = dataclasses.fields(Capabilities)


def _torch_capabilities(cls: type[Optimizer]) -> Capabilities:
    for base in cls.__mro__:
        if base in _TORCH and issubclass(base, Optimizer):
            # A subclass with a step of its own may compute anything.
            inherits = inspect.unwrap(cls.step) is inspect.unwrap(base.step)
            return _TORCH[base] if inherits else Capabilities()
    return Capabilities()
