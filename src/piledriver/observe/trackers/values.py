"""Copies of logged values, so that later changes by training do not reach a tracker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LEAVES = frozenset({float, int, str, bool, type(None)})
"""Types that are logged as they are: nearly all values, so they are looked for first."""


def copy_values(value: Any) -> Any:
    """Return one-element tensors and arrays as numbers, and larger ones as copies in host memory.

    >>> import torch
    >>> copy_values({"loss": torch.tensor([0.5]), "per_layer": torch.ones(2)})
    {'loss': 0.5, 'per_layer': tensor([1., 1.])}
    """
    if type(value) in _LEAVES:
        return value
    if isinstance(value, Mapping):
        # No call for the values that are leaves, nearly all: this runs in every step.
        return {str(key): item if type(item) in _LEAVES else copy_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copy_values(item) for item in value]
    if not _is_array(value):
        return value
    if _length(value) == 1:
        return value.item()
    return value.detach().cpu().clone() if hasattr(value, "detach") else value.copy()


def plain_values(value: Any) -> Any:
    """Return tensors and arrays as numbers and lists; other objects are unchanged.

    >>> import torch
    >>> plain_values({"loss": torch.tensor(0.5), "per_layer": torch.ones(2)})
    {'loss': 0.5, 'per_layer': [1.0, 1.0]}
    """
    if type(value) in _LEAVES:
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    return value.tolist() if _is_array(value) else value


def _is_array(value: Any) -> bool:
    # torch tensors and NumPy values alike, without importing either.
    return hasattr(value, "tolist") and hasattr(value, "dtype")


def _length(value: Any) -> int:
    return int(value.numel()) if hasattr(value, "numel") else int(value.size)
