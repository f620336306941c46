"""Find tied parameters (one object under several names), and tie them again after a step replaced them."""

from __future__ import annotations

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
