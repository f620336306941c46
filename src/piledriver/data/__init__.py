"""Floor 2: shards of text to tokens to batches, with an exact cursor; sharding of any torch `DataLoader`.

Names are imported on first use: tokenising does not need torch.
"""

from __future__ import annotations

from piledriver.core.lazy import lazy_names

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
__getattr__, __dir__ = lazy_names(__name__, _FACE)
