"""Continuations of held-out texts while a model trains, to be read beside its curves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from piledriver.core import storage
from piledriver.core.errors import UsageError
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.data.tokens.token_set import open_tokens
from piledriver.engine.compile import eager
from piledriver.evaluate.scorers import TransformerScorer
from piledriver.evaluate.validation import read_spread
from piledriver.models import Transformer
from piledriver.runtime.world import World

if TYPE_CHECKING:
    from piledriver.corpus import Document

_SOURCES, _PROMPT_TOKENS, _NEW_TOKENS = 3, 24, 32
_DOCUMENTS = 100

Sampler = Callable[[Transformer, World], list[dict[str, str]]]


def sampler(corpus: storage.Location, tokens: storage.Location) -> Sampler:
    """Return a function from a model to greedy continuations of one text of each of the first sources.

    Rank 0 writes them; a model that no rank holds whole gives none.
    """
    made = cache(lambda: _prompts(corpus, open_tokens(tokens).tokenizer()))

    def samples(model: Transformer, world: World) -> list[dict[str, str]]:
        if not world.is_main:
            return []
        tokenizer, prompts = made()
        scorer = TransformerScorer(model)
        found = []
        try:
            for source, ids in prompts:
                with eager(model):
                    written = scorer.greedy(ids, min(_NEW_TOKENS, scorer.length - len(ids)), lambda _: False)
                found.append({"source": source, "prompt": tokenizer.decode(ids), "text": tokenizer.decode(written)})
        except UsageError:  # sharded over ranks
            return []
        return found

    return samples


def _prompts(corpus: storage.Location, tokenizer: Tokenizer) -> tuple[Tokenizer, list[tuple[str, list[int]]]]:
    first: dict[str, Document] = {}
    for document in read_spread(corpus, _DOCUMENTS):
        first.setdefault(document.source, document)
    chosen = [first[source] for source in sorted(first)[:_SOURCES]]
    return tokenizer, [(one.source, tokenizer.encode(one.text).tolist()[:_PROMPT_TOKENS]) for one in chosen]
