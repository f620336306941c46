"""Train a byte-level BPE tokenizer on a corpus sample, weighted by source."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from piledriver.core import storage
from piledriver.core.errors import ConfigError, PiledriverError, UsageError
from piledriver.core.random import Stream
from piledriver.corpus import read_shards
from piledriver.data.tokenizer import encoders
from piledriver.data.tokenizer.formats.tokenizer_json import from_json
from piledriver.data.tokenizer.tokenizer import Tokenizer

# The trainer allocates all ids at once. No vocabulary is near this limit.
MAX_VOCAB_SIZE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class TokenizerTraining:
    """Settings of tokenizer training."""

    vocab_size: int = 32768
    """Number of ids, including the 256 bytes and the special tokens."""
    special_tokens: tuple[str, ...] = ("<|endoftext|>",)
    """Special tokens; the first separates documents."""
    weights: dict[str, float] = field(default_factory=dict)
    """Relative weight of each source in the sample's bytes; 1 for sources that are not named."""
    sample_bytes: int = 500_000_000
    """Approximate size of the sample."""
    min_frequency: int = 2
    """Occurrences that a pair needs to be merged."""
    seed: int = 0
    """Seed of the sample."""

    def __post_init__(self) -> None:
        least = 256 + len(self.special_tokens)
        if not least <= self.vocab_size <= MAX_VOCAB_SIZE:
            raise ConfigError(f"vocab_size is {self.vocab_size}", fix=f"it must be from {least} to {MAX_VOCAB_SIZE}")
        if not self.special_tokens:
            raise ConfigError("special_tokens is empty", fix="give the token that separates documents")
        if "" in self.special_tokens or len(set(self.special_tokens)) < len(self.special_tokens):
            raise ConfigError(f"special_tokens are {list(self.special_tokens)}", fix="give each once, and no empty one")
        for source, weight in self.weights.items():
            if not 0 <= weight < math.inf:
                raise ConfigError(
                    f"the weight of {source!r} is {weight:g}", fix="use 0 to exclude a source, 2 for twice its bytes"
                )


def train_tokenizer(corpus: storage.Location, training: TokenizerTraining | None = None) -> Tokenizer:
    """Train a tokenizer on a corpus of text shards; deterministic."""
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
        # All 256 bytes are tokens, so that any text can be encoded and decodes to the same bytes.
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(sampled_texts(corpus, training, shares), trainer)
    return from_json(str(made.to_str(pretty=True)).encode("utf-8"))


def source_shares(corpus: storage.Location, training: TokenizerTraining) -> dict[str, float]:
    """Return the fraction of each source's text that goes into the sample, at most 1."""
    sizes: dict[str, int] = {}
    for document in read_shards(corpus):
        sizes[document.source] = sizes.get(document.source, 0) + len(document.text.encode("utf-8"))
    if not any(sizes.values()):
        raise PiledriverError(f"{corpus} has no text to train on", fix="check the build that wrote it")
    unknown = set(training.weights) - set(sizes)
    if unknown:
        raise UsageError(
            f"the corpus has no source {sorted(unknown)[0]!r}", fix=f"choose from {', '.join(sorted(sizes))}"
        )
    weights = {source: training.weights.get(source, 1.0) for source in sizes}
    if not training.weights:
        # No weights given: sources in their natural proportions.
        weights = {source: float(size) for source, size in sizes.items()}
    total = sum(weights.values())
    if total <= 0:
        raise UsageError("every source has weight 0", fix="give one a positive weight")
    return {
        source: min(1.0, training.sample_bytes * weights[source] / total / max(1, sizes[source])) for source in sizes
    }


def sampled_texts(corpus: storage.Location, training: TokenizerTraining, shares: dict[str, float]) -> Iterator[str]:
    """Yield the texts of the sample. Each document is drawn by its id, independently of the others."""
    stream = Stream(training.seed, "tokenizer sample")
    for document in read_shards(corpus):
        if stream.child(document.id).uniform(0) < shares[document.source]:
            yield document.text
