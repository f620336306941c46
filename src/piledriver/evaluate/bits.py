"""Bits per byte: how many bits a model needs for each byte of text it has not seen.

BPB = -sum of log-likelihoods (nats) / (bytes * ln 2), each document alone, every token scored once, sums over all
documents (not a mean of means). It does not depend on the tokenizer's idea of a token, so models with different
tokenizers can be compared (The Pile, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from piledriver.core.errors import UsageError
from piledriver.corpus import Document
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.evaluate.batches import batches
from piledriver.evaluate.scorers import Scorer
from piledriver.evaluate.windows import Window, rolling_windows
from piledriver.runtime.collectives.operations import gather_object
from piledriver.runtime.world import World

# Windows are sorted by length within so many, so that a batch wastes little on padding.
_SORTED_AT_ONCE = 512
# Names of sources that would be taken for something else in a table.
_UNCLEAR = {"": "(no source)", "all": "(source all)"}


@dataclass(frozen=True)
class DocumentScore:
    """One document's part of the sums."""

    index: int
    source: str
    nats: float
    tokens: int
    bytes: int
    words: int


def bits_per_byte(
    scorer: Scorer,
    tokenizer: Tokenizer,
    documents: Iterable[Document],
    *,
    context: int = 1,
    batch_tokens: int = 8192,
    boundary: str | None = None,
    world: World | None = None,
) -> list[DocumentScore]:
    """Score every document once; `summarise` turns the scores into figures.

    With a `world`, each process takes every size-th document and all get all scores, in the order of the documents, so
    that sums do not depend on how many processes there were. `boundary` names the special token that stands between
    documents, where the tokenizer's own names do not tell.
    """
    rank, size = (world.rank, world.size) if world is not None else (0, 1)
    prefix = tokenizer.boundary(boundary)
    scores = list(_scored(scorer, tokenizer, prefix, documents, context, batch_tokens, rank, size))
    if size > 1:
        assert world is not None
        scores = [score for part in gather_object(world, scores) for score in part]
    return sorted(scores, key=lambda score: score.index)


def _scored(
    scorer: Scorer,
    tokenizer: Tokenizer,
    prefix: int,
    documents: Iterable[Document],
    context: int,
    batch_tokens: int,
    rank: int,
    size: int,
) -> Iterator[DocumentScore]:
    nats: dict[int, float] = {}
    waiting: list[Window] = []
    known: dict[int, tuple[str, int, int, int]] = {}
    for index, document in enumerate(documents):
        if index % size != rank:
            continue
        content = document.text.encode("utf-8", "replace")  # half a surrogate pair is no character: it is one byte, "?"
        text = content.decode("utf-8")
        ids = tokenizer.encode(text)
        _check_ids(index, max(prefix, int(ids.max(initial=0))), scorer.vocab_size)
        known[index] = (document.source, len(ids), len(content), len(text.split()))
        nats[index] = 0.0
        waiting += rolling_windows(index, ids, prefix, scorer.length, context)
        if len(waiting) >= _SORTED_AT_ONCE:
            _score(scorer, waiting, batch_tokens, nats)
            waiting = []
    _score(scorer, waiting, batch_tokens, nats)
    for index, (source, tokens, size_bytes, words) in known.items():
        yield DocumentScore(index, source, nats[index], tokens, size_bytes, words)


def _check_ids(document: int, largest: int, vocab_size: int) -> None:
    if largest >= vocab_size:
        raise UsageError(
            f"document {document} has the token {largest}, and the model knows {vocab_size}",
            fix="give the model's own tokenizer",
        )


def _score(scorer: Scorer, windows: Sequence[Window], batch_tokens: int, nats: dict[int, float]) -> None:
    """Add the losses of the windows to their documents."""
    for batch, inputs, targets in batches(windows, batch_tokens, scorer.device):
        losses = scorer.losses(inputs, targets).double().sum(dim=1).tolist()
        for window, loss in zip(batch, losses, strict=True):
            nats[window.document] += loss


@dataclass(frozen=True)
class Figures:
    """What the scores of one source, or of all, come to."""

    documents: int
    bytes: int
    tokens: int
    words: int
    bits_per_byte: float
    low: float
    """Lower end of the 95% interval, by bootstrap over documents; not a number where there are not two with text."""
    high: float
    perplexity_per_token: float
    perplexity_per_word: float


def summarise(scores: Sequence[DocumentScore], *, resamples: int = 1000, seed: int = 0) -> dict[str, Figures]:
    """The figures by source, in the order of first appearance, and of everything under "all", which comes last."""
    groups: dict[str, list[DocumentScore]] = {}
    for score in scores:
        groups.setdefault(_UNCLEAR.get(score.source, score.source), []).append(score)
    figures = {source: _figures(group, resamples, seed) for source, group in groups.items()}
    return {**figures, "all": _figures(scores, resamples, seed)}


def _figures(scores: Sequence[DocumentScore], resamples: int, seed: int) -> Figures:
    # fsum is exact: the order of the documents and the number of processes leave no trace in the last digit.
    nats, size = math.fsum(score.nats for score in scores), sum(score.bytes for score in scores)
    tokens, words = sum(score.tokens for score in scores), sum(score.words for score in scores)
    low, high = _interval(scores, resamples, seed)
    return Figures(
        documents=len(scores),
        bytes=size,
        tokens=tokens,
        words=words,
        bits_per_byte=nats / (size * math.log(2)) if size else math.nan,
        low=low,
        high=high,
        perplexity_per_token=_exp(nats / tokens) if tokens else math.nan,
        perplexity_per_word=_exp(nats / words) if words else math.nan,
    )


def _interval(scores: Sequence[DocumentScore], resamples: int, seed: int) -> tuple[float, float]:
    if sum(score.bytes > 0 for score in scores) < 2 or not resamples:
        return math.nan, math.nan
    nats = np.array([score.nats for score in scores])
    sizes = np.array([score.bytes for score in scores], float)
    random = np.random.Generator(np.random.Philox(seed))
    drawn = [random.integers(0, len(scores), len(scores)) for _ in range(resamples)]
    values = [nats[chosen].sum() / (sizes[chosen].sum() * math.log(2)) for chosen in drawn if sizes[chosen].sum()]
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
