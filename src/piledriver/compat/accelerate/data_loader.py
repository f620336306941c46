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
from piledriver.data.loader_dispatcher import DataLoaderDispatcher
from piledriver.data.loader_shard import DataLoaderShard, SkipDataLoader

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


@functools.wraps(data.prepare_data_loader)
def prepare_data_loader(*args: Any, **kwargs: Any) -> Any:
    """One process's share of a loader."""
    loader: Any = data.prepare_data_loader(*args, **kwargs)
    loader.gradient_state = GradientState()
    return loader


@functools.wraps(data.skip_first_batches)
def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """The same loader without its first batches."""
    return data.skip_first_batches(dataloader, num_batches)
