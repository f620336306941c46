"""Keep what a trained classifier takes for good, with a little of the rest, as the Pile did with Common Crawl.

A document of score s is kept where a Pareto variate of shape alpha exceeds 1 - s. The variate is a pure function of the
seed and the document's id: the same documents are kept in any order, on any machine, after any crash.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import xxhash

from piledriver.core.random import Stream
from piledriver.corpus.document import Document
from piledriver.corpus.filters.classifier import Classifier, load_classifier
from piledriver.corpus.filters.verdict import Drop


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Is it like the texts that the classifier was shown as good ones?"""

    FILES: ClassVar[tuple[str, ...]] = ("model",)

    model: str
    """A file that 'piledriver corpus classifier' made."""
    alpha: float | None = 3.0
    """Shape of the Pareto rule: smaller keeps more. Null keeps by `min_score` alone."""
    min_score: float = 0.0
    """Scores below are dropped in any case."""
    seed: int = 42
    """The recipe's, where it is not given."""

    def __call__(self, document: Document) -> Document | Drop:
        """Judge one document."""
        score = _model(self.model).score(document.text)
        if score < self.min_score or (
            self.alpha is not None and pareto(self.alpha, self.seed, document.id) <= 1 - score
        ):
            return Drop("quality", f"{score:.3f}")
        return document


def pareto(alpha: float, seed: int, document_id: str) -> float:
    """A Pareto (Lomax) variate for one document."""
    uniform = Stream(seed, "quality").uniform(xxhash.xxh3_64_intdigest(document_id.encode()))
    return float((1.0 - uniform) ** (-1.0 / alpha) - 1.0)


@lru_cache(maxsize=2)
def _model(path: str) -> Classifier:
    return load_classifier(path)
