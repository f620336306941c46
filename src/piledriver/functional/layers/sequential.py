"""Modules in a row, and an activation with a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from piledriver.functional.errors import TransformError, dotted
from piledriver.functional.initialisers import constant, zeros
from piledriver.functional.module import Module


class Sequential(Module):
    """Modules and functions one after another: `Sequential([Dense(8), torch.relu, Dense(1)])`.

    The first gets all arguments; a tuple that one returns is spread over the arguments of the next, a mapping over its
    arguments by name. Parameters lie under `layers_0`, `layers_1`, ... by position, functions counted.
    """

    layers: Sequence[Callable[..., Any]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # so that the module has a hash

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.layers:
            raise TransformError(f"{dotted(self.path)}: a Sequential without layers", fix="give it one or more")
        for i, layer in enumerate(self.layers):
            call = self.child(f"layers_{i}", layer) if isinstance(layer, Module) else layer
            output = call(*args, **kwargs)
            args, kwargs = (output if isinstance(output, tuple) else (output,)), {}
            if isinstance(output, Mapping):
                args, kwargs = (), dict(output)
        return output


class PReLU(Module):
    """x where it is positive, else x times a learned slope (He et al., 2015)."""

    param_dtype: torch.dtype = torch.float32
    negative_slope_init: float = 0.01

    def __call__(self, x: Tensor) -> Tensor:
        init = constant(self.negative_slope_init) if self.is_initialising else zeros
        slope = self.param("negative_slope", init, (), self.param_dtype)
        return torch.where(x >= 0, x, slope.to(x.dtype) * x)
