"""Floor 2: shards of text to tokens to batches, with an exact cursor; sharding of any torch `DataLoader`.

The names below are imported when they are first used: tokenising must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_FACE = {
    "BatchSamplerShard": "samplers",
    "Cursor": "cursor",
    "DataLoaderDispatcher": "loader_dispatcher",
    "DataLoaderShard": "loader_shard",
    "DataLoaderStateMixin": "loader_base",
    "IterableDatasetShard": "iterable_shard",
    "Segment": "record",
    "SeedableRandomSampler": "samplers",
    "SkipBatchSampler": "samplers",
    "SkipDataLoader": "loader_shard",
    "StreamConfig": "stream",
    "TokenBatch": "token_loader",
    "TokenLoader": "token_loader",
    "TokenSet": "token_set",
    "TokenStream": "stream",
    "Tokenizer": "tokenizer",
    "TokenizerTraining": "tokenizer_training",
    "Tokenizing": "tokenize",
    "get_sampler": "loader_base",
    "open_stream": "stream",
    "open_tokenizer": "tokenizer",
    "open_tokens": "token_set",
    "prepare_data_loader": "prepare",
    "record_stream": "record",
    "skip_first_batches": "prepare",
    "tokenize_corpus": "tokenize",
    "trace_document": "trace",
    "trace_step": "trace",
    "train_tokenizer": "tokenizer_training",
}

__all__ = [*_FACE]


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(f"piledriver.data.{_FACE[name]}"), name)
    raise AttributeError(f"module 'piledriver.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
