"""torch.compile in place: the model stays the object it was, and repeated blocks can be compiled once for all."""

from __future__ import annotations

from typing import Any

from torch import nn

from piledriver.accelerator.options import DynamoBackend, TorchDynamoPlugin


def compile_in_place(model: nn.Module, plugin: TorchDynamoPlugin) -> None:
    """Compile the model, or its repeated blocks, as the plugin says; `state_dict` keys do not change."""
    if plugin.backend == DynamoBackend.NO or plugin.disable:
        return
    from piledriver.engine.blocks import blocks_of
    from piledriver.engine.compile import compile_modules

    options = plugin.to_kwargs()
    blocks = (list(blocks_of(model).values()) or repeated_blocks(model)) if plugin.use_regional_compilation else []
    if blocks:
        compile_modules(blocks, **options)
    else:
        model.compile(**options)


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of every list of modules of one class: one compilation serves them all.

    >>> len(repeated_blocks(nn.Sequential(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), nn.ReLU())))
    3
    """
    found: list[nn.Module] = []
    for module in model.modules():
        if is_repeated(module):
            found += list(module.children())
    return found


def is_repeated(module: nn.Module) -> bool:
    """Whether this is a list of several modules of one class."""
    members: list[Any] = list(module) if isinstance(module, nn.ModuleList) else []
    return len(members) > 1 and all(type(member) is type(members[0]) for member in members)
