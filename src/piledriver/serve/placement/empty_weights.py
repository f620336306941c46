"""Build a model whose parameters have a shape and no memory, or are on another device from the start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Create parameters on the meta device within the block, and buffers too with `include_buffers`.

    >>> with init_empty_weights():
    ...     layer = nn.Linear(1_000, 1_000)
    >>> layer.weight.is_meta
    True
    """
    with init_on_device(torch.device("meta"), include_buffers=bool(include_buffers)):
        yield


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Create parameters on a device within the block, and buffers too with `include_buffers`."""
    if include_buffers:
        with device:
            yield
        return
    register = nn.Module.register_parameter

    def on_device(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        held = module._parameters[name]
        if held is not None and held.device != device:
            moved = type(held)(held.to(device), requires_grad=held.requires_grad)
            moved.__dict__.update({key: value for key, value in held.__dict__.items() if key != "requires_grad"})
            module._parameters[name] = moved

    nn.Module.register_parameter = on_device  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
