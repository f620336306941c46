"""Whole-corpus stages: what a stage is, the registry of stages, and what a recipe's `use:` refers to.

A stage is one file in `stages/`: a frozen dataclass whose fields are its settings, which plans tasks over the chunks of
a corpus when it is called, and the functions that these tasks run. Another package adds a stage through the entry-point
group `piledriver.stage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from piledriver.core.config import from_mapping
from piledriver.core.errors import UnknownNameError, UsageError
from piledriver.core.registry import Registry
from piledriver.corpus.filters import FILTERS
from piledriver.corpus.pipeline.chunks import LEVEL, DocumentChunk, chunk_of
from piledriver.corpus.pipeline.executors import Executor
from piledriver.corpus.pipeline.tasks import Task, TaskResult


@dataclass(frozen=True)
class StageOutcome:
    """What a stage did: its chunks, and what each of its tasks that wrote one reported."""

    stage: str
    chunks: list[DocumentChunk] = field(default_factory=list)
    results: list[tuple[str, TaskResult]] = field(default_factory=list)
    """(source, result) of each task that wrote a chunk."""


@dataclass(frozen=True)
class StageInput:
    """What a stage works on and with."""

    executor: Executor
    chunks: list[DocumentChunk]
    memory_bytes: int = 2 << 30
    """What one task may hold when it sorts."""
    level: int = LEVEL
    """The zstd level of the chunks that the stage writes."""

    @property
    def documents(self) -> int:
        """Return the number of documents in all chunks."""
        return sum(chunk.documents for chunk in self.chunks)

    def rewrite(self, stage: str, tasks: Iterable[Task]) -> StageOutcome:
        """Run one task for each chunk, which writes the chunk anew, and return the outcome of the stage."""
        return stage_outcome(stage, zip((c.source for c in self.chunks), self.executor.map(tasks), strict=True))


class CorpusStage(Protocol):
    """A frozen dataclass whose fields are the settings, and which rewrites the chunks of a corpus.

    Settings that name files are listed in a class variable `FILES`.
    """

    def __call__(self, corpus: StageInput) -> StageOutcome:
        """Run the tasks of the stage and return the new chunks."""


STAGES: Registry[type[CorpusStage]] = Registry(
    "stage",
    {
        "exact": "piledriver.corpus.pipeline.stages.exact:Exact",
        "near": "piledriver.corpus.pipeline.stages.near:Near",
        "paragraphs": "piledriver.corpus.pipeline.stages.paragraphs:Paragraphs",
        "substring": "piledriver.corpus.pipeline.stages.substring:Substring",
        "decontaminate": "piledriver.corpus.pipeline.stages.decontaminate:Decontaminate",
    },
)


def stage_outcome(stage: str, results: Iterable[tuple[str, TaskResult]]) -> StageOutcome:
    """Return the outcome of a stage from (source, result) of its tasks. A task that kept nothing gives no chunk."""
    kept = list(results)
    chunks = [chunk_of(result, source) for source, result in kept if result.values["documents"]]
    return StageOutcome(stage, chunks, kept)


def make_stage(use: str, settings: Mapping[str, Any]) -> Any:
    """Return the filter or stage of a name with checked settings."""
    return from_mapping(_class(use), settings, f"stage {use}")


def file_settings(use: str) -> tuple[str, ...]:
    """Return which settings of a filter or stage name files; of an unknown one, none."""
    return tuple(getattr(_class(use), "FILES", ())) if use in FILTERS or use in STAGES else ()


def _class(use: str) -> type[Any]:
    if use in FILTERS and use in STAGES:
        raise UsageError(f"{use!r} names a filter and a stage", fix="uninstall the package that adds one of them")
    if use in FILTERS:
        return FILTERS[use]
    if use in STAGES:
        return STAGES[use]
    raise UnknownNameError("stage", use, [*FILTERS, *STAGES])
