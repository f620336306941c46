"""`accelerate.data_loader`: our loaders, registered with the shared gradient state."""

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


def _registered(loader: Any) -> Any:
    loader.gradient_state = GradientState()
    return loader


class _BaseInstances(type):
    """Counts the loaders that `prepare` returns, which are of the base class, as instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__bases__[0])


class DataLoaderShard(_DataLoaderShard, metaclass=_BaseInstances):
    """Our loader, registered with the shared gradient state."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _registered(_DataLoaderShard(*args, **kwargs))


class DataLoaderDispatcher(_DataLoaderDispatcher, metaclass=_BaseInstances):
    """Our loader, registered with the shared gradient state."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _registered(_DataLoaderDispatcher(*args, **kwargs))


class SkipDataLoader(_SkipDataLoader, metaclass=_BaseInstances):
    """Our loader, registered with the shared gradient state."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return _registered(_SkipDataLoader(*args, **kwargs))


@functools.wraps(data.prepare_data_loader)
def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
    """Return a loader of this rank's share of the batches."""
    return _registered(data.prepare_data_loader(*args, **kwargs))


@functools.wraps(data.skip_first_batches)
def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return the loader without its first batches."""
    return data.skip_first_batches(dataloader, num_batches)
