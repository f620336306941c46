"""Samples: the model continues the first words of held-out documents, one of each domain."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch

from piledriver.corpus import Document
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.models import Transformer
from piledriver.serve import Sampling, generate

_TOKENS = 80
_PROMPT_WORDS, _PROMPT_CHARACTERS = 16, 120


@dataclass(frozen=True)
class Sample:
    """The first words of a held-out document, with the continuations of the model and of the document."""

    domain: str
    prompt: str
    written: str
    """What the model drew."""
    in_document: str
    """What the document says there, about as much."""


def make_samples(model: Transformer, tokenizer: Tokenizer, documents: Iterable[Document]) -> list[Sample]:
    """One sample of each domain, from its first document that is long enough. The same documents, the same text."""
    first: dict[str, Document] = {}
    for document in documents:
        if len(document.text) > 2 * _PROMPT_CHARACTERS:
            first.setdefault(document.source, document)
    return [_sample(model, tokenizer, first[domain]) for domain in sorted(first)]


def first_words(text: str) -> str:
    """The first words of a text as they stand there, cut between words where that is possible.

    Without the space behind them: in most tokens it stands before a word, and a model hardly knows one that is alone.

    >>> first_words("def area(side):\\n    return side ** 2\\n")
    'def area(side):\\n    return side ** 2'
    """
    # One character more than wanted: a word that reaches there is cut, and left out.
    words = islice(re.finditer(r"\S+", text[: _PROMPT_CHARACTERS + 1]), _PROMPT_WORDS)
    ends = [word.end() for word in words if word.end() <= _PROMPT_CHARACTERS]
    return text[: ends[-1] if ends else _PROMPT_CHARACTERS]


def _sample(model: Transformer, tokenizer: Tokenizer, document: Document) -> Sample:
    prompt = first_words(document.text)
    # A word of strange characters may be a token a byte: never more of them than the model has places.
    ids = [tokenizer.boundary(), *tokenizer.encode(prompt).tolist()][: model.config.max_positions - _TOKENS]
    drawn = generate(model, torch.tensor([ids]), _TOKENS, Sampling(temperature=0.7, top_k=40))[0, len(ids) :].tolist()
    end = drawn.index(tokenizer.boundary()) if tokenizer.boundary() in drawn else len(drawn)
    written = tokenizer.decode(drawn[:end])
    length = max(len(written), _PROMPT_CHARACTERS)
    return Sample(document.source, prompt, written, document.text[len(prompt) :][:length])
