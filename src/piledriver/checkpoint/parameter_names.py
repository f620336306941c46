"""State-dict keys without wrapper prefixes, and optimizer states keyed by parameter name.

torch numbers an optimizer's parameters in the order of its groups. On a rank that holds other layers these numbers
differ, so a checkpoint keys optimizer states by the name of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

# Added to keys by torch.compile and by torch's activation checkpoint wrapper.
UNNAMED = "unnamed."
"""Start of the name of a parameter that no model has, before its position."""
_INFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel or DataParallel."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model


def clean_key(key: str) -> str:
    """Return a state-dict key without the infixes of wrappers.

    >>> clean_key("_orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    for infix in _INFIXES:
        key = key.replace(infix, "")
    return key


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state under clean keys. Tied parameters are one object under several keys."""
    return {clean_key(key): value for key, value in unwrap_model(model).state_dict(keep_vars=True).items()}


def names_by_id(models: Sequence[nn.Module]) -> dict[int, str]:
    """Return the name of each parameter by its `id`; names of the second model start with `1:`, and so on.

    Where an optimizer steps on a shard of a parameter (`optimizer_shard`), the shard has the name of the parameter.
    """
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        for name, parameter in unwrap_model(model).named_parameters():
            for one in (parameter, getattr(parameter, "optimizer_shard", None)):
                names.setdefault(id(one), clean_key(name) if index == 0 else f"{index}:{clean_key(name)}")
    names.pop(id(None), None)
    return names


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return the torch optimizer inside a wrapper that keeps it in `.optimizer`."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def named_parameters_of(optimizer: Any, names: Mapping[int, str]) -> Iterator[tuple[int, int, str, torch.Tensor]]:
    """Yield group, position over all groups, name and parameter, in the optimizer's order."""
    position = 0
    for group_index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            yield group_index, position, names.get(id(parameter), f"{UNNAMED}{position}"), parameter
            position += 1


def optimizer_state(optimizer: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with parameter names in place of numbers."""
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
