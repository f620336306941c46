"""Logged values as plain Python: tensors and arrays become numbers and lists before they leave the training thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Numbers, text, lists and dictionaries; other objects (a wandb image) pass as they are.

    >>> import torch
    >>> plain({"loss": torch.tensor(0.5), "per_layer": torch.ones(2)})
    {'loss': 0.5, 'per_layer': [1.0, 1.0]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    # torch tensors and NumPy values alike, without importing either.
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        value = value.detach() if hasattr(value, "detach") else value
        return value.tolist()
    return value
