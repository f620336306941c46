"""Keep documents that a classifier scores high, and some of the others, as The Pile did with Common Crawl.

A document of score s is kept if a Pareto variate of shape alpha exceeds 1 - s. The variate is a pure function of the
seed and the document's id: the same documents are kept in any order, on any machine, after any crash.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import xxhash

from piledriver.core.random import Stream
from piledriver.corpus.document import Document
from piledriver.corpus.filters import Drop
from piledriver.corpus.filters.classifier import load_classifier

_model = lru_cache(maxsize=2)(load_classifier)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Drop documents that a classifier scores low, with a random margin."""

    FILES: ClassVar[tuple[str, ...]] = ("model",)

    model: str
    """A file that 'piledriver corpus classifier' wrote."""
    alpha: float | None = 3.0
    """Shape of the Pareto distribution: smaller keeps more. Null: `min_score` alone decides."""
    min_score: float = 0.0
    """Drop documents with a lower score in any case."""
    seed: int = 42
    """Seed of the variates; the recipe's if not given."""

    def __call__(self, document: Document) -> Document | Drop:
        """Judge one document."""
        score = _model(self.model).score(document.text)
        if score < self.min_score or (
            self.alpha is not None and pareto(self.alpha, self.seed, document.id) <= 1 - score
        ):
            return Drop("quality", f"{score:.3f}")
        return document


def pareto(alpha: float, seed: int, document_id: str) -> float:
    """Return the Pareto (Lomax) variate of one document."""
    uniform = Stream(seed, "quality").uniform(xxhash.xxh3_64_intdigest(document_id.encode()))
    return float((1.0 - uniform) ** (-1.0 / alpha) - 1.0)
