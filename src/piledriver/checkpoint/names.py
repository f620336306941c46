"""Names that survive wrappers and layouts: model keys without prefixes, optimizer states by parameter name.

torch numbers an optimizer's parameters in the order of its groups. That order means nothing on a rank that holds other
layers, so a checkpoint names each one by its parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

# Left in keys by torch.compile and by torch's activation checkpoint wrapper.
_INFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


def bare(model: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel or DataParallel."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model


def clean(key: str) -> str:
    """A state-dict key as the user wrote it.

    >>> clean("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    for infix in _INFIXES:
        key = key.replace(infix, "")
    return key


def model_state(model: nn.Module) -> dict[str, Any]:
    """A model's state under clean keys. Tied parameters are one object under several keys."""
    return {clean(key): value for key, value in bare(model).state_dict(keep_vars=True).items()}


def parameter_names(models: Sequence[nn.Module]) -> dict[int, str]:
    """The name of each parameter by identity; those of a second model carry its number.

    Where an optimizer steps on a shard of a parameter (`optimizer_shard`), the shard has its name too.
    """
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        for name, parameter in bare(model).named_parameters():
            for one in (parameter, getattr(parameter, "optimizer_shard", None)):
                names.setdefault(id(one), clean(name) if index == 0 else f"{index}:{clean(name)}")
    names.pop(id(None), None)
    return names


def inner_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper that keeps it in `.optimizer`."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def named_parameters_of(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[int, int, str, torch.Tensor]]:
    """Group, position over all groups, name and parameter, in the optimizer's order."""
    position = 0
    for group_index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield group_index, position, names.get(id(parameter), f"unnamed.{position}"), parameter
            position += 1


def optimizer_state(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """`optimizer.state_dict()` with names for numbers."""
    state = optimizer.state_dict()
    by_position = {position: name for _, position, name, _ in named_parameters_of(optimizer, names)}
    return {
        **{key: value for key, value in state.items() if key not in ("state", "param_groups")},
        "state": {by_position[position]: value for position, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [by_position[position] for position in group["params"]]}
            for group in state["param_groups"]
        ],
    }
