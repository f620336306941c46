"""Measure what compression costs: the change of bits per byte, document by document, and tokens per second."""

from __future__ import annotations

import math
from collections.abc import Sequence

from piledriver.core.errors import UsageError
from piledriver.evaluate import DocumentScore

# 97.5% quantile of the normal distribution.
_NORMAL = 1.959964


def paired_change(dense: Sequence[DocumentScore], other: Sequence[DocumentScore]) -> tuple[float, float, float]:
    """Return the relative change of bits per byte on the same documents, with its 95% interval.

    Documents differ far more from each other than a document's two scores do, so the interval of the paired differences
    is much narrower than those of the figures. It follows from the residuals of the ratio (linearisation).

    >>> one = [DocumentScore(i, "", nats, 1, 1, 1) for i, nats in enumerate([10.0, 20.0, 30.0])]
    >>> two = [DocumentScore(i, "", nats, 1, 1, 1) for i, nats in enumerate([11.0, 22.0, 33.0])]
    >>> [round(value, 6) for value in paired_change(one, two)]
    [0.1, 0.1, 0.1]
    """
    if [(score.index, score.bytes) for score in dense] != [(score.index, score.bytes) for score in other]:
        raise UsageError("the scores are of different documents", fix="score both models on the same documents")
    total = math.fsum(score.nats for score in dense)
    if len(dense) < 2 or not total:
        return math.nan, math.nan, math.nan
    ratio = math.fsum(score.nats for score in other) / total
    squares = math.fsum((b.nats - ratio * a.nats) ** 2 for a, b in zip(dense, other, strict=True))
    error = math.sqrt(squares * len(dense) / (len(dense) - 1)) / total
    return ratio - 1.0, ratio - 1.0 - _NORMAL * error, ratio - 1.0 + _NORMAL * error
