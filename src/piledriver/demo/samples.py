"""Samples of the model: continuations of the first words of held-out documents, one per domain."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from piledriver.corpus import Document
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.models import Transformer
from piledriver.serve import SamplingParams, generate

_TOKENS = 80
_PROMPT_WORDS, _PROMPT_CHARACTERS = 16, 120


@dataclass(frozen=True)
class Sample:
    """The first words of a held-out document, with the continuations of the model and of the document."""

    domain: str
    prompt: str
    written: str
    """The continuation of the model."""
    in_document: str
    """The continuation of the document, of similar length."""


def make_samples(model: Transformer, tokenizer: Tokenizer, documents: Iterable[Document]) -> list[Sample]:
    """Return one sample per domain, from its first document that is long enough; deterministic."""
    first: dict[str, Document] = {}
    for document in documents:
        if len(document.text) > 2 * _PROMPT_CHARACTERS:
            first.setdefault(document.source, document)
    return [_sample(model, tokenizer, first[domain]) for domain in sorted(first)]


def first_words(text: str) -> str:
    """Return the first words of a text, cut between words if possible, without trailing space.

    Most tokenizers put the space at the start of a word, so a trailing one would be an unusual token.

    >>> first_words("def area(side):\\n    return side ** 2\\n")
    'def area(side):\\n    return side ** 2'
    """
    # One character more than wanted: a word that reaches it is incomplete and omitted.
    words = islice(re.finditer(r"\S+", text[: _PROMPT_CHARACTERS + 1]), _PROMPT_WORDS)
    ends = [word.end() for word in words if word.end() <= _PROMPT_CHARACTERS]
    return text[: ends[-1] if ends else _PROMPT_CHARACTERS]


def _sample(model: Transformer, tokenizer: Tokenizer, document: Document) -> Sample:
    prompt = first_words(document.text)
    # Unusual characters may be one token per byte: keep the prompt within the context.
    ids = [tokenizer.boundary(), *tokenizer.encode(prompt).tolist()][: model.config.max_positions - _TOKENS]
    params = SamplingParams(max_tokens=_TOKENS, temperature=0.7, top_k=40)
    [output] = generate(model, [ids], params, tokenizer=tokenizer)
    written = output.completions[0].text
    length = max(len(written), _PROMPT_CHARACTERS)
    return Sample(document.source, prompt, written, document.text[len(prompt) :][:length])
