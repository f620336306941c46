"""Tokenise the corpus of a run before its first step, unless the config names token shards."""

from __future__ import annotations

import os

from piledriver.core import storage
from piledriver.core.errors import ConfigError, MissingFileError, UsageError
from piledriver.runtime.hardware import find_hardware
from piledriver.runtime.process_order import main_process_first
from piledriver.runtime.world import World
from piledriver.train.config import TrainConfig
from piledriver.train.pretrained import tokenizer_of

TOKENS, TOKENIZER = "tokens", "tokenizer.json"


def tokens_folder(config: TrainConfig) -> str:
    """Return the folder of the run's token shards, which need not exist yet."""
    return config.data.tokens if config.data.tokens is not None else os.path.join(config.out, TOKENS)


def split_of(corpus: storage.Location, name: str) -> str | None:
    """Return the folder of a split of a corpus that `piledriver corpus build` wrote; None without splits."""
    folder = os.path.join(corpus, name)
    return folder if os.path.isdir(folder) else None


def make_tokens(config: TrainConfig, vocab_size: int, world: World) -> str:
    """Return the folder of token shards; rank 0 writes them into the run folder if the config names a corpus.

    Without a tokenizer in the config or in the model's folder, one of the model's vocabulary size is trained on the
    corpus. Files of an interrupted start are reused.
    """
    folder, corpus = tokens_folder(config), config.data.corpus
    if corpus is None:
        return folder
    # Imported here: a run on token shards needs no code that reads text.
    from piledriver.corpus import read_shards
    from piledriver.data.tokenizer.open import open_tokenizer
    from piledriver.data.tokenizer.training import TokenizerTraining, train_tokenizer
    from piledriver.data.tokens.tokenize import tokenize_corpus

    if not os.path.exists(corpus):
        raise MissingFileError(corpus, fix="data.corpus must be a shard or a folder of shards of text")
    text = split_of(corpus, "train") or corpus
    if next(iter(read_shards(text)), None) is None:
        raise UsageError(
            f"{text} holds no documents", fix="check the step that wrote it: it may have dropped every document"
        )
    given = tokenizer_of(config)
    if given is not None and (ids := open_tokenizer(given).vocab_size) > vocab_size:
        raise ConfigError(
            f"the model has {vocab_size} ids, the tokenizer {given} uses {ids}",
            fix=f"set model.vocab_size to {ids} or more, or use another tokenizer",
        )
    with main_process_first(world):
        if world.is_main:
            tokenizer = given or os.path.join(config.out, TOKENIZER)
            if given is None and not storage.exists(tokenizer):
                learned = train_tokenizer(text, TokenizerTraining(vocab_size=vocab_size))
                storage.write_bytes(tokenizer, learned.content)
            tokenize_corpus(text, tokenizer, folder, workers=find_hardware().cores)
    return folder
