"""Find the models of a loop that was not written for a profiler: by the parameters that its optimizers hold."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import nn


def find_models(optimizers: Iterable[Any]) -> dict[str, nn.Module]:
    """Return the outermost modules that own parameters of the optimizers, or, if none does, that have gradients.

    Names are `model`, `model_2` and so on, the largest first.
    """
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    roots = [module for module in modules if id(module) not in inner]
    stepped = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    found = [root for root in roots if any(id(p) in stepped for p in root.parameters())]
    if not found:
        found = [root for root in roots if any(p.grad is not None for p in root.parameters())]
    found.sort(key=lambda root: -sum(p.numel() for p in root.parameters()))
    return {"model" if not index else f"model_{index + 1}": root for index, root in enumerate(found)}
