"""Floor 2: shards of text to tokens to batches, with an exact cursor; sharding of any torch `DataLoader`.

The names below are imported when they are first used: tokenising must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_FACE = {
    "BatchSamplerShard": "samplers",
    "DataLoaderDispatcher": "loader_dispatcher",
    "DataLoaderShard": "loader_shard",
    "DataLoaderStateMixin": "loader_base",
    "IterableDatasetShard": "iterable_shard",
    "SeedableRandomSampler": "samplers",
    "SkipBatchSampler": "samplers",
    "SkipDataLoader": "loader_shard",
    "get_sampler": "loader_base",
    "prepare_data_loader": "prepare",
    "skip_first_batches": "prepare",
}

__all__ = [*_FACE]


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(f"piledriver.data.{_FACE[name]}"), name)
    raise AttributeError(f"module 'piledriver.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
