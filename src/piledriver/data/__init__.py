"""Floor 2: shards of text to tokens to batches, with an exact cursor; sharding of any torch `DataLoader`.

The names below are imported when they are first used: tokenising must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_FACE = {
    "BatchSamplerShard": "loaders.samplers.batch",
    "Cursor": "cursor",
    "DataLoaderDispatcher": "loaders.dispatcher",
    "DataLoaderShard": "loaders.shard",
    "DataLoaderStateMixin": "loaders.base",
    "IterableDatasetShard": "loaders.iterable_shard",
    "Segment": "record",
    "SeedableRandomSampler": "loaders.samplers.random",
    "SkipBatchSampler": "loaders.samplers.batch",
    "SkipDataLoader": "loaders.shard",
    "StreamConfig": "stream.token_stream",
    "TokenBatch": "stream.loader",
    "TokenLoader": "stream.loader",
    "TokenSet": "tokens.token_set",
    "TokenStream": "stream.token_stream",
    "Tokenizer": "tokenizer.tokenizer",
    "TokenizerTraining": "tokenizer.training",
    "TokenizeConfig": "tokens.tokenize",
    "get_sampler": "loaders.base",
    "open_stream": "stream.token_stream",
    "open_tokenizer": "tokenizer.open",
    "open_tokens": "tokens.token_set",
    "prepare_data_loader": "loaders.prepare",
    "record_stream": "record",
    "skip_first_batches": "loaders.prepare",
    "tokenize_corpus": "tokens.tokenize",
    "trace_document": "trace",
    "trace_step": "trace",
    "train_tokenizer": "tokenizer.training",
}

__all__ = [*_FACE]


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(f"piledriver.data.{_FACE[name]}"), name)
    raise AttributeError(f"module 'piledriver.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
