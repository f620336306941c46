"""Rows of a nested batch: slice them, concatenate batches. The dispatcher cuts batches with these."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from piledriver.runtime.collectives.nested import find_batch_size, rebuild_mapping, rebuild_sequence, tensors


def take_rows(batch: Any, part: slice, process_index: int = 0, num_processes: int = 1) -> Any:
    """Return a slice of every tensor, and of every plain list that has one item per sample.

    `process_index` and `num_processes` are unused: a user's own `slice_fn` receives them.

    >>> take_rows({"x": torch.arange(4), "names": ["a", "b", "c", "d"], "split": "train"}, slice(1, 3))
    {'x': tensor([1, 2]), 'names': ['b', 'c'], 'split': 'train'}
    """
    return _take(batch, part, find_batch_size(batch))


def _take(data: Any, part: slice, rows: int | None) -> Any:
    if isinstance(data, torch.Tensor):
        return data[part] if data.ndim else data
    if isinstance(data, Mapping):
        return rebuild_mapping(data, {key: _take(value, part, rows) for key, value in data.items()})
    if isinstance(data, (list, tuple)):
        if _is_column(data):
            return data[part] if len(data) == rows else data
        return rebuild_sequence(data, (_take(item, part, rows) for item in data))
    return data


def join_rows(batches: list[Any]) -> Any:
    """Concatenate batches of the same structure."""
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(batches) if first.ndim else first
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {key: join_rows([batch[key] for batch in batches]) for key in first})
    if isinstance(first, (list, tuple)):
        if _is_column(first):
            return type(first)(chain.from_iterable(batches))
        return rebuild_sequence(first, (join_rows(list(items)) for items in zip(*batches, strict=True)))
    return first


def _is_column(data: Any) -> bool:
    """Return whether a sequence holds one plain value per sample (names, ids) rather than parts of a batch."""
    return not hasattr(data, "_fields") and next(tensors(data), None) is None
