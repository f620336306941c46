"""Bits per byte by source on held-out text while a model trains."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from piledriver.core import storage
from piledriver.corpus import Document, read_shards
from piledriver.data.token_set import open_tokens
from piledriver.data.tokenizer import Tokenizer
from piledriver.evaluate.bits import bits_per_byte, summarise
from piledriver.evaluate.scorers import TransformerScorer
from piledriver.models import Transformer


def validation(
    corpus: storage.Location, tokens: storage.Location, *, documents: int
) -> Callable[[Transformer], dict[str, float]]:
    """A function from a model to its bits per byte by source, on the first documents of a corpus."""
    tokenizer = open_tokens(tokens).tokenizer()
    return on_documents(list(islice(read_shards(corpus), documents)), tokenizer)


def on_documents(documents: list[Document], tokenizer: Tokenizer) -> Callable[[Transformer], dict[str, float]]:
    """The same for documents in hand."""

    def figures(model: Transformer) -> dict[str, float]:
        scores = bits_per_byte(TransformerScorer(model), tokenizer, documents)
        model.train()
        return {source: row.bits_per_byte for source, row in summarise(scores, resamples=0).items()}

    return figures
