"""Clusters of equal and nearly equal documents, which may not be spread over several splits."""

from __future__ import annotations

from piledriver.corpus.dedup.minhash import MinHashSettings
from piledriver.corpus.pipeline.stage_registry import StageInput
from piledriver.corpus.pipeline.stages.drop_duplicates import label_clusters
from piledriver.corpus.pipeline.stages.exact import exact_edges
from piledriver.corpus.pipeline.stages.near import near_edges
from piledriver.corpus.pipeline.tasks import TaskResult


def duplicate_clusters(corpus: StageInput) -> TaskResult:
    """Return the finished task that holds the `clusters` of a corpus with numbered chunks; nothing is dropped."""
    near, _ = near_edges(corpus, MinHashSettings())
    return label_clusters(corpus.executor, [*exact_edges(corpus), *near], corpus.documents)
