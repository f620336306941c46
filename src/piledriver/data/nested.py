"""The few operations on nested batches (mappings, tuples, lists of tensors) that the loaders need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Apply a function to every tensor, keeping the types of the containers.

    >>> map_tensors(lambda t: t.shape[0], {"x": torch.zeros(3, 2), "name": "a"})
    {'x': 3, 'name': 'a'}
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return cast(Any, type(data))({key: map_tensors(function, value) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(function, item) for item in data))
    if isinstance(data, (list, tuple)):
        return type(data)(map_tensors(function, item) for item in data)
    return data


def to_device(data: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """Move every tensor, and everything else that knows how to move itself, to a device."""
    if not isinstance(data, (torch.Tensor, Mapping, list, tuple)) and hasattr(data, "to"):
        return data.to(device)
    if isinstance(data, Mapping):
        return cast(Any, type(data))({key: to_device(value, device, non_blocking) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(to_device(item, device, non_blocking) for item in data))
    if isinstance(data, (list, tuple)):
        return type(data)(to_device(item, device, non_blocking) for item in data)
    return data.to(device, non_blocking=non_blocking) if isinstance(data, torch.Tensor) else data


def batch_size_of(data: Any) -> int | None:
    """The first dimension of the first tensor, or None where there is no tensor."""
    if isinstance(data, torch.Tensor):
        return data.shape[0] if data.ndim else None
    items = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return next((size for item in items if (size := batch_size_of(item)) is not None), None)


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """The same rows of every tensor. (The two last arguments are there for a user's own function in this place.)"""
    return map_tensors(lambda tensor: tensor[tensor_slice] if tensor.ndim else tensor, data)


def concatenate(parts: list[Any]) -> Any:
    """Batches of the same structure, one after the other, joined along the first dimension."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts) if first.ndim else first
    if isinstance(first, Mapping):
        return cast(Any, type(first))({key: concatenate([part[key] for part in parts]) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(concatenate(list(items)) for items in zip(*parts, strict=True)))
    if isinstance(first, (list, tuple)):
        return type(first)(concatenate(list(items)) for items in zip(*parts, strict=True))
    return first


def tensors_in(data: Any) -> list[torch.Tensor]:
    """Every tensor, in a fixed order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, data)
    return found
