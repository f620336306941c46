"""Our loaders under Accelerate's names; those made here tell the shared gradient state where they are."""

from __future__ import annotations

import functools
from typing import Any

from piledriver import data
from piledriver.compat.accelerate.state import GradientState
from piledriver.data import (
    BatchSamplerShard,
    DataLoaderStateMixin,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    get_sampler,
)
from piledriver.data.loaders.dispatcher import DataLoaderDispatcher as _DataLoaderDispatcher
from piledriver.data.loaders.shard import DataLoaderShard as _DataLoaderShard
from piledriver.data.loaders.shard import SkipDataLoader as _SkipDataLoader

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]


def _told(loader: Any) -> Any:
    loader.gradient_state = GradientState()
    return loader


class _AlsoOurs(type):
    """Loaders that `prepare` made are instances too, although they were not made here."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__bases__[0])


class DataLoaderShard(_DataLoaderShard, metaclass=_AlsoOurs):
    """Ours, telling the shared gradient state where it is."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _told(_DataLoaderShard(*args, **kwargs))


class DataLoaderDispatcher(_DataLoaderDispatcher, metaclass=_AlsoOurs):
    """Ours, telling the shared gradient state where it is."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _told(_DataLoaderDispatcher(*args, **kwargs))


class SkipDataLoader(_SkipDataLoader, metaclass=_AlsoOurs):
    """Ours, telling the shared gradient state where it is."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _told(_SkipDataLoader(*args, **kwargs))


@functools.wraps(data.prepare_data_loader)
def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
    """One process's share of a loader."""
    return _told(data.prepare_data_loader(*args, **kwargs))


@functools.wraps(data.skip_first_batches)
def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """The same loader without its first batches."""
    return data.skip_first_batches(dataloader, num_batches)
