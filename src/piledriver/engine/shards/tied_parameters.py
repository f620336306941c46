"""Find tied parameters (one object under several names), and tie them again after a step replaced them."""

from __future__ import annotations

from typing import Any

from torch import nn


def find_tied(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that share one parameter, each in the model's order.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> model[1].weight = model[0].weight
    >>> find_tied(model)
    [['0.weight', '1.weight']]
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def retie(model: nn.Module, groups: list[list[str]]) -> None:
    """Tie each group again, to the parameter of its first name."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            if getattr(module, leaf) is not parameter:
                setattr(module, leaf, parameter)


_ALIASES = "_tied_keys"


def record_tied_keys(model: nn.Module, keys: dict[str, str]) -> None:
    """Remember state dict keys whose module is on another pipeline stage than the weight it shares: {alias: owner}."""
    model.__dict__[_ALIASES] = keys


def add_tied_keys(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return a full state dict with the recorded aliases, so that it has the keys of the unsplit model."""
    keys: dict[str, str] = model.__dict__.get(_ALIASES, {})
    return state | {alias: state[owner] for alias, owner in keys.items() if owner in state}
