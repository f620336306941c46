"""Train a byte-level BPE tokenizer from a corpus, each source with its own share of the sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from piledriver.core import storage
from piledriver.core.errors import ConfigError, PiledriverError, UsageError
from piledriver.core.random import Stream
from piledriver.corpus import read_shards
from piledriver.data.tokenizer import encoders
from piledriver.data.tokenizer.tokenizer import Tokenizer, from_json

# The trainer makes room for all ids at once; this much fits everywhere, and no vocabulary is near it.
MOST_IDS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class TokenizerTraining:
    """What tokenizer to train."""

    vocab_size: int = 32768
    """Ids in all, the 256 bytes and the special tokens included."""
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Special tokens; the first stands between documents."""
    weights: dict[str, float] = field(default_factory=dict)
    """Bytes of each source in the sample, relative to the others; a source that is not named has weight 1."""
    sample_bytes: int = 500_000_000
    """About how much text to learn from."""
    min_frequency: int = 2
    """How often a pair has to occur to become a token."""
    seed: int = 0
    """Which documents are drawn."""

    def __post_init__(self) -> None:
        least = 256 + len(self.special_tokens)
        if not least <= self.vocab_size <= MOST_IDS:
            raise ConfigError(f"vocab_size is {self.vocab_size}", fix=f"it must be from {least} to {MOST_IDS}")
        if not self.special_tokens:
            raise ConfigError("special_tokens is empty", fix="name the token that stands between documents")
        if "" in self.special_tokens or len(set(self.special_tokens)) < len(self.special_tokens):
            raise ConfigError(f"special tokens are {list(self.special_tokens)}", fix="name each once, and none ''")
        for source, weight in self.weights.items():
            if not 0 <= weight < math.inf:
                raise ConfigError(
                    f"the weight of {source!r} is {weight:g}", fix="use 0 to leave a source out, 2 for twice"
                )


def train_tokenizer(corpus: storage.Location, training: TokenizerTraining | None = None) -> Tokenizer:
    """Learn a tokenizer from a corpus of text shards. Same corpus and settings, same tokenizer."""
    training = training or TokenizerTraining()
    shares = source_shares(corpus, training)
    library = encoders.import_tokenizers()
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=training.vocab_size,
        min_frequency=training.min_frequency,
        special_tokens=list(training.special_tokens),
        # All 256 bytes are tokens from the start, so that any text can be encoded and comes back byte for byte.
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(sampled_texts(corpus, training, shares), trainer)
    return from_json(str(made.to_str(pretty=True)).encode("utf-8"))


def source_shares(corpus: storage.Location, training: TokenizerTraining) -> dict[str, float]:
    """The fraction of each source's text that goes into the sample, at most all of it."""
    sizes: dict[str, int] = {}
    for document in read_shards(corpus):
        sizes[document.source] = sizes.get(document.source, 0) + len(document.text.encode("utf-8"))
    if not any(sizes.values()):
        raise PiledriverError(f"{corpus} has no text to learn from", fix="check what wrote it")
    unknown = set(training.weights) - set(sizes)
    if unknown:
        raise UsageError(
            f"the corpus has no source {sorted(unknown)[0]!r}", fix=f"choose from {', '.join(sorted(sizes))}"
        )
    weights = {source: training.weights.get(source, 1.0) for source in sizes}
    if not training.weights:
        # Nothing asked for: every source as it stands in the corpus.
        weights = {source: float(size) for source, size in sizes.items()}
    total = sum(weights.values())
    if total <= 0:
        raise UsageError("every source has weight 0, so there is nothing to learn from", fix="give one a weight")
    return {
        source: min(1.0, training.sample_bytes * weights[source] / total / max(1, sizes[source])) for source in sizes
    }


def sampled_texts(corpus: storage.Location, training: TokenizerTraining, shares: dict[str, float]) -> Iterator[str]:
    """The texts of the sample. A document is in it or not by its own random number, whatever else the corpus holds."""
    stream = Stream(training.seed, "tokenizer sample")
    for document in read_shards(corpus):
        if stream.child(document.id).uniform(0) < shares[document.source]:
            yield document.text
