"""Text to tokens before the first step, where a run was given a corpus and not token shards."""

from __future__ import annotations

import os

from piledriver.core import storage
from piledriver.core.errors import ConfigError, MissingFileError, UsageError
from piledriver.runtime.hardware import find_hardware
from piledriver.runtime.process_order import main_process_first
from piledriver.runtime.world import World
from piledriver.train.config import TrainConfig

TOKENS, TOKENIZER = "tokens", "tokenizer.json"


def tokens_folder(config: TrainConfig) -> str:
    """Where the run's token shards are, or will be."""
    return config.data.tokens if config.data.tokens is not None else os.path.join(config.out, TOKENS)


def split_of(corpus: storage.Location, name: str) -> str | None:
    """The folder of a split, where a corpus has splits (as `piledriver corpus build` writes them)."""
    folder = os.path.join(corpus, name)
    return folder if os.path.isdir(folder) else None


def make_tokens(config: TrainConfig, vocab_size: int, world: World) -> str:
    """The folder of token shards. From a corpus they are made in the run's folder, once, by the main process.

    Where no tokenizer was given one is learned from the corpus, as large as the model's vocabulary. An interrupted run
    goes on with what is there.
    """
    folder, corpus = tokens_folder(config), config.data.corpus
    if corpus is None:
        return folder
    # Here, because a run on token shards needs nothing that reads text.
    from piledriver.corpus import read_shards
    from piledriver.data.tokenizer.open import open_tokenizer
    from piledriver.data.tokenizer.training import TokenizerTraining, train_tokenizer
    from piledriver.data.tokens.tokenize import tokenize_corpus

    if not os.path.exists(corpus):
        raise MissingFileError(corpus, fix="data.corpus must be a shard or a folder of shards of text")
    text = split_of(corpus, "train") or corpus
    if next(iter(read_shards(text)), None) is None:
        raise UsageError(f"{text} holds no documents", fix="look at what made it: every document may have been dropped")
    if config.data.tokenizer is not None and (ids := open_tokenizer(config.data.tokenizer).vocab_size) > vocab_size:
        raise ConfigError(
            f"the model has {vocab_size} ids, the tokenizer {config.data.tokenizer} uses {ids}",
            fix=f"set model.vocab_size to {ids} or more, or use another tokenizer",
        )
    with main_process_first(world):
        if world.is_main:
            tokenizer = config.data.tokenizer or os.path.join(config.out, TOKENIZER)
            if config.data.tokenizer is None and not storage.exists(tokenizer):
                learned = train_tokenizer(text, TokenizerTraining(vocab_size=vocab_size))
                storage.write_bytes(tokenizer, learned.content)
            tokenize_corpus(text, tokenizer, folder, workers=find_hardware().cores)
    return folder
