"""Logged values as they are now: what training changes later must not show in what a tracker sends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def taken(value: Any) -> Any:
    """Numbers for tensors and arrays of one element, copies in host memory for larger ones (some services draw them).

    >>> import torch
    >>> taken({"loss": torch.tensor([0.5]), "per_layer": torch.ones(2)})
    {'loss': 0.5, 'per_layer': tensor([1., 1.])}
    """
    if isinstance(value, Mapping):
        return {str(key): taken(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [taken(item) for item in value]
    if not _is_array(value):
        return value
    if _length(value) == 1:
        return value.item()
    return value.detach().cpu().clone() if hasattr(value, "detach") else value.copy()


def plain(value: Any) -> Any:
    """Numbers, text, lists and dictionaries only, as far as it goes; other objects pass as they are.

    >>> import torch
    >>> plain({"loss": torch.tensor(0.5), "per_layer": torch.ones(2)})
    {'loss': 0.5, 'per_layer': [1.0, 1.0]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if _is_array(value) else value


def _is_array(value: Any) -> bool:
    # torch tensors and NumPy values alike, without importing either.
    return hasattr(value, "tolist") and hasattr(value, "dtype")


def _length(value: Any) -> int:
    return int(value.numel()) if hasattr(value, "numel") else int(value.size)
