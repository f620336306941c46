"""Bits per byte by source on held-out text while a model trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING

from piledriver.core import storage
from piledriver.core.errors import UsageError
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.data.tokens.token_set import open_tokens
from piledriver.evaluate.bits import bits_per_byte, summarise
from piledriver.evaluate.scorers import TransformerScorer
from piledriver.models import Transformer
from piledriver.runtime.world import World

if TYPE_CHECKING:
    from piledriver.corpus import Document


def validation(
    corpus: storage.Location, tokens: storage.Location, *, documents: int
) -> Callable[[Transformer, World], dict[str, float]]:
    """Return a function from a model to its bits per byte by source, on documents spread evenly over a corpus.

    All ranks of the world call it together and get the same figures. The tokenizer of the token shards is opened at
    the first call, because the run may still have to make the shards.
    """
    chosen = read_spread(corpus, documents)
    if not chosen:
        raise UsageError(f"{corpus} holds no documents", fix="give --validation a shard or a folder of shards of text")
    made = cache(lambda: on_documents(chosen, open_tokens(tokens).tokenizer()))
    return lambda model, world: made()(model, world)


def read_spread(corpus: storage.Location, count: int) -> list[Document]:
    """Return `count` documents, evenly spaced, of the text shards of a corpus."""
    from piledriver.corpus import read_shards  # packages that only text shards need

    return spread(read_shards(corpus), count)


def spread(documents: Iterable[Document], count: int) -> list[Document]:
    """Return at most `count` documents, evenly spaced from first to last: corpora are often sorted by source.

    >>> from piledriver.corpus import Document
    >>> [document.text for document in spread((Document(str(i)) for i in range(100)), 4)]
    ['0', '24', '48', '72']
    """
    kept: list[Document] = []
    stride = 1
    for number, document in enumerate(documents):
        if number % stride == 0:
            kept.append(document)
        if len(kept) >= 8 * count:
            kept, stride = kept[::2], 2 * stride
    return [kept[at * len(kept) // count] for at in range(count)] if len(kept) > count else kept


def on_documents(documents: list[Document], tokenizer: Tokenizer) -> Callable[[Transformer, World], dict[str, float]]:
    """Return a function from a model, whole or sharded, to its bits per byte by source on these documents."""

    def figures(model: Transformer, world: World) -> dict[str, float]:
        scores = bits_per_byte(TransformerScorer(model), tokenizer, documents, world=world)
        model.train()
        return {source: row.bits_per_byte for source, row in summarise(scores, resamples=0).items()}

    return figures
