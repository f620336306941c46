"""Exact deduplication of whole documents, by 128-bit hashes of their normalised texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from piledriver.corpus.dedup.arrays import write_arrays
from piledriver.corpus.dedup.exact import find_repeated, hash_text, normalise_case_and_space, write_hashes
from piledriver.corpus.dedup.runs import hash_ranges
from piledriver.corpus.pipeline.catalogue import Catalogue, store_catalogue
from piledriver.corpus.pipeline.chunks import number_chunks, read_chunk_texts
from piledriver.corpus.pipeline.stage_registry import StageInput, StageOutcome
from piledriver.corpus.pipeline.stages.drop_duplicates import keep_first, label_clusters
from piledriver.corpus.pipeline.tasks import Task, TaskResult, work_folder


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Drop documents whose text equals an earlier one but for case and white space. It has no settings."""

    def __call__(self, corpus: StageInput) -> StageOutcome:
        """Run the stage."""
        corpus = replace(corpus, chunks=number_chunks(corpus.chunks))
        labels = label_clusters(corpus.executor, exact_edges(corpus), corpus.documents)
        return keep_first(corpus, "exact", labels)


def exact_edges(corpus: StageInput) -> Iterator[TaskResult]:
    """Find edges between equal documents; the chunks are numbered."""
    hashed = corpus.executor.map(Task.call(hash_texts, chunk=chunk.key) for chunk in corpus.chunks)
    listed = ((result.key, chunk.first, chunk.documents) for result, chunk in zip(hashed, corpus.chunks, strict=True))
    runs = store_catalogue(corpus.executor, listed)
    return corpus.executor.map(
        Task.call(match_texts, runs=runs, low=low, high=high)
        for low, high in hash_ranges(corpus.documents, corpus.memory_bytes)
    )


def hash_texts(folder: str, chunk: str) -> dict[str, Any]:
    """Write the sorted hashes of the texts of a chunk (a task)."""
    hashes = [hash_text(normalise_case_and_space(text)) for text in read_chunk_texts(folder, chunk)]
    return {"documents": write_hashes(hashes, folder)}


def match_texts(folder: str, runs: str, low: int, high: int) -> dict[str, Any]:
    """Write an edge from each document with hashes in one range to the equal document before it (a task)."""
    earlier, later = find_repeated(Catalogue(work_folder(folder), runs).runs(), low, high)
    write_arrays(folder, edges=np.stack([earlier, later], axis=1))
    return {"edges": len(later)}
