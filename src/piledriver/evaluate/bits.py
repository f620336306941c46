"""Bits per byte: the mean number of bits that a model needs to encode one byte of held-out text.

BPB = -sum of log-likelihoods (nats) / (bytes * ln 2), summed over all documents (not a mean of means), each document
alone, every token scored once. It does not depend on how a tokenizer splits the text, so models with different
tokenizers can be compared (Gao et al., The Pile, 2020, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from piledriver.core.errors import UsageError
from piledriver.core.random import Stream
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.evaluate.scorers import Scorer
from piledriver.evaluate.windows import Window, batches, rolling_windows
from piledriver.runtime.collectives.operations import gather_object
from piledriver.runtime.world import World

if TYPE_CHECKING:
    from piledriver.corpus import Document

# Windows are sorted by length in chunks of this many, so that batches hold little padding.
_SORTED_AT_ONCE = 512
# Source names that would read as something else in a table.
_AMBIGUOUS = {"": "(no source)", "all": "(source all)"}


@dataclass(frozen=True)
class DocumentScore:
    """The sums of one document."""

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
    """Score every document once, and return the scores in the order of the documents.

    `summarise` turns them into figures. With a `world`, ranks share the documents and all of them return all scores,
    so that sums do not depend on the number of processes. A model that is sharded over ranks is scored by all of them
    together, each group of ranks that holds one copy with its share of the documents. `boundary` names the special
    token between documents where the tokenizer has none of the usual names.
    """
    rank, size = (0, 1) if world is None else scorer.share(world)
    prefix = tokenizer.boundary(boundary)
    scores = _score_share(scorer, tokenizer, prefix, documents, context, batch_tokens, rank, size)
    if world is not None and world.is_distributed:
        # Ranks of one copy of a sharded model return the same scores.
        scores = list({score.index: score for part in gather_object(world, scores) for score in part}.values())
    return sorted(scores, key=lambda score: score.index)


def _score_share(
    scorer: Scorer,
    tokenizer: Tokenizer,
    prefix: int,
    documents: Iterable[Document],
    context: int,
    batch_tokens: int,
    rank: int,
    size: int,
) -> list[DocumentScore]:
    nats: dict[int, float] = {}
    waiting: list[Window] = []
    known: dict[int, tuple[str, int, int, int]] = {}
    for index, document in enumerate(documents):
        if index % size != rank:
            continue
        content = document.text.encode("utf-8", "replace")  # an unpaired surrogate counts as one byte, "?"
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
    while scorer.idle():
        pass
    return [
        DocumentScore(index, source, nats[index], tokens, size_bytes, words)
        for index, (source, tokens, size_bytes, words) in known.items()
    ]


def _check_ids(document: int, largest: int, vocab_size: int) -> None:
    if largest >= vocab_size:
        raise UsageError(
            f"document {document} has the token id {largest}, but the model's vocabulary has {vocab_size} ids",
            fix="use the tokenizer that the model was trained with",
        )


def _score(scorer: Scorer, windows: Sequence[Window], batch_tokens: int, nats: dict[int, float]) -> None:
    """Add the losses of the windows to their documents."""
    for batch, inputs, targets in batches(windows, batch_tokens, scorer.device):
        losses = scorer.losses(inputs, targets).double().sum(dim=1).tolist()
        for window, loss in zip(batch, losses, strict=True):
            nats[window.document] += loss


@dataclass(frozen=True)
class Figures:
    """Aggregate figures of one source, or of all documents."""

    documents: int
    bytes: int
    tokens: int
    words: int
    bits_per_byte: float
    low: float
    """Lower end of the 95% interval, by studentised bootstrap over documents; NaN with fewer than two."""
    high: float
    perplexity_per_token: float
    perplexity_per_word: float


def summarise(scores: Sequence[DocumentScore], *, resamples: int = 1000, seed: int = 0) -> dict[str, Figures]:
    """Return figures by source in the order of first appearance, then those of all documents under "all"."""
    groups: dict[str, list[DocumentScore]] = {}
    for score in scores:
        groups.setdefault(_AMBIGUOUS.get(score.source, score.source), []).append(score)
    figures = {source: _figures(group, resamples, seed) for source, group in groups.items()}
    return {**figures, "all": _figures(scores, resamples, seed)}


def _figures(scores: Sequence[DocumentScore], resamples: int, seed: int) -> Figures:
    # fsum is exact, so the last digit does not depend on the order of the documents or the number of processes.
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
    """Return the 95% interval by the studentised bootstrap (Efron, 1981), no narrower than Student's t interval.

    Percentiles of resampled figures cover too little with few documents of very different lengths. Here each resample
    is divided by its own standard error, which follows from the residuals of the ratio.
    """
    if sum(score.bytes > 0 for score in scores) < 2 or not resamples:
        return math.nan, math.nan
    nats = np.array([score.nats for score in scores])
    sizes = np.array([score.bytes for score in scores], float)
    figure, error = (float(value[0]) for value in _ratio_and_error(nats[None], sizes[None]))
    found = [_ratio_and_error(nats[chosen], sizes[chosen]) for chosen in _resamples(len(scores), resamples, seed)]
    ratios, errors = (np.concatenate(part) for part in zip(*found, strict=True))
    usable = errors > 1e-9 * figure  # NaN and a resample of equal documents have no spread
    low, high = np.percentile((ratios[usable] - figure) / errors[usable], [2.5, 97.5]) if usable.any() else (0.0, 0.0)
    least = _student_quantile(len(scores) - 1)
    unit = math.log(2)
    return max(0.0, figure - max(high, least) * error) / unit, (figure + max(-low, least) * error) / unit


def _ratio_and_error(
    nats: npt.NDArray[np.float64], sizes: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return nats per byte of each row, and its standard error by linearisation."""
    count, total = nats.shape[1], sizes.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = nats.sum(axis=1) / total
        squares = ((nats - ratio[:, None] * sizes) ** 2).sum(axis=1)
        return ratio, np.sqrt(squares * count / (count - 1)) / total


def _resamples(count: int, resamples: int, seed: int) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield rows of `count` indices drawn with replacement, a few million at a time: 32 random bits each."""
    stream = Stream(seed, "bootstrap")
    for sample in range(0, resamples, rows := max(1, (1 << 22) // count)):
        drawn = min(rows, resamples - sample)
        words = stream.child(sample).bits(np.arange(-(-drawn * count // 2))).view(np.uint32)[: drawn * count]
        yield np.asarray((words.astype(np.uint64) * np.uint64(count)) >> np.uint64(32)).reshape(drawn, count)


def _student_quantile(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t (Abramowitz and Stegun, 26.7.5).

    >>> round(_student_quantile(9), 3), round(_student_quantile(1000), 3)
    (2.262, 1.962)
    """
    z = 1.959964
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + math.fsum(term / float(degrees) ** power for power, term in enumerate(terms, 1))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
