"""A recipe to a corpus: the order of the stages, said once.

checksums, extract; then the recipe's stages (runs of filters in one pass, the others over everything); then splits,
epochs and shuffle; then publish, ledger and, last of all, the manifest.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from piledriver.core import storage
from piledriver.core.config import to_mapping
from piledriver.core.errors import PiledriverError, UnknownNameError, UsageError
from piledriver.core.progress import Progress, progress
from piledriver.corpus.pipeline import passage_stages, stages
from piledriver.corpus.pipeline.chunks import LEVEL, Chunk, numbered
from piledriver.corpus.pipeline.executors import Executor, executor
from piledriver.corpus.pipeline.ledger import write_ledger
from piledriver.corpus.pipeline.manifest import MANIFEST, Manifest
from piledriver.corpus.pipeline.mix import mix
from piledriver.corpus.pipeline.publish import publish, versions
from piledriver.corpus.pipeline.recipe import Recipe, StageEntry, source_name
from piledriver.corpus.pipeline.stage_settings import WHOLE_CORPUS, file_settings, near_settings, stage_settings
from piledriver.corpus.pipeline.stages import InputFile, StageOutcome
from piledriver.corpus.pipeline.tasks import Done, remove_leftovers
from piledriver.corpus.sources import resolve
from piledriver.corpus.text.token_counts import TokenCounter, tokenizer_file

WORK = ".work"
# What a stage reports by name and number, besides documents and bytes.
_COUNTS = ("dropped", "licences", "replaced", "removed", "hits")


def build_corpus(recipe: Recipe, out: str, *, executor_name: str = "local", workers: int = 1) -> Manifest:
    """Build a corpus, or go on with one that was interrupted. A wrong recipe is refused before any work."""
    check(recipe)
    storage.make_folder(out)
    work = os.path.join(os.path.abspath(out), WORK)
    with (
        alone(out),
        progress(f"build {recipe.name}", unit="tasks") as bar,
        executor(executor_name, work, workers) as opened,
    ):
        remove_leftovers(work)
        counted = Counted(opened, bar)
        inputs, extracted = _extracted(counted, recipe, bar)
        outcomes = [extracted, *_staged(counted, recipe, extracted.chunks, bar)]
        chunks = numbered(outcomes[-1].chunks)
        if not chunks:
            raise PiledriverError("every document was dropped", fix="loosen the filters; the drops are counted above")
        bar.note("mix")
        labels = _split_labels(counted, recipe, chunks)
        shards, shares = mix(counted, recipe, chunks, labels)
        if os.path.exists(os.path.join(out, MANIFEST)):
            os.unlink(os.path.join(out, MANIFEST))
        published = publish(out, shards)
        ledger = write_ledger(out, work, outcomes)
    manifest = Manifest(
        name=recipe.name,
        versions=versions(),
        recipe=_portable(recipe),
        inputs=[
            {"source": file.source, "origin": file.origin, "size": file.size, "sha256": file.sha256} for file in inputs
        ],
        stages=[account(outcome) for outcome in outcomes],
        mix={name: share.account() for name, share in shares.items()},
        outputs=[*published, ledger],
    )
    manifest.save(out)
    return manifest


def check(recipe: Recipe) -> None:
    """Refuse a recipe that names what does not exist or settings that do not fit."""
    names = {source_name(entry) for entry in recipe.sources}
    for source in recipe.sources:
        resolve(source.source)
    if recipe.tokenizer is not None:
        TokenCounter(tokenizer_file(recipe.tokenizer))
    for stage in recipe.stages:
        settings = stage_settings(stage.use, stage.settings)
        for name in getattr(settings, "FILES", ()):
            given = getattr(settings, name)
            for path in given if isinstance(given, list) else [given] if given is not None else []:
                if not os.path.exists(path):
                    raise UsageError(f"stage {stage.use}: {path} does not exist", fix=f"check its setting {name}")
        for name in stage.sources:
            if name not in names:
                raise UnknownNameError(f"source in stage {stage.use!r}:", name, names)


def _extracted(opened: Executor, recipe: Recipe, bar: Progress) -> tuple[list[InputFile], StageOutcome]:
    inputs: list[InputFile] = []
    outcomes = []
    for entry in recipe.sources:
        name = source_name(entry)
        bar.note(f"extract {name}")
        files = stages.checksum_inputs(opened, name, entry)
        inputs += files
        outcomes.append(stages.extract(opened, name, entry, files))
    chunks = [chunk for outcome in outcomes for chunk in outcome.chunks]
    reports = [report for outcome in outcomes for report in outcome.reports]
    return inputs, StageOutcome("extract", chunks, reports, [key for outcome in outcomes for key in outcome.keys])


def _staged(opened: Executor, recipe: Recipe, chunks: list[Chunk], bar: Progress) -> Iterator[StageOutcome]:
    """Runs of filters go over each chunk in one pass; a deduplication looks at all of them together."""
    first = True
    for is_filter, group in groupby(recipe.stages, key=lambda stage: stage.use not in WHOLE_CORPUS):
        entries = list(group)
        if is_filter or first:
            bar.note("filter")
            outcome = stages.filters(opened, chunks, entries if is_filter else [], recipe.licences, recipe.seed)
            chunks = outcome.chunks
            yield outcome
        first = False
        for entry in [] if is_filter else entries:
            bar.note(entry.use)
            outcome = over_all(opened, recipe.memory_bytes, chunks, entry)
            chunks = outcome.chunks
            yield outcome
    if first:
        yield stages.filters(opened, chunks, [], recipe.licences, recipe.seed)


def over_all(
    opened: Executor, memory_bytes: int, chunks: list[Chunk], entry: StageEntry, level: int = LEVEL
) -> StageOutcome:
    """One stage that looks at the documents of all chunks together, or of those of its sources.

    `level` is how hard its chunks are compressed.
    """
    chosen = [chunk for chunk in chunks if not entry.sources or chunk.source in entry.sources]
    if not chosen:
        return StageOutcome(entry.use, chunks, [], [])
    settings = stage_settings(entry.use, entry.settings)
    match entry.use:
        case "exact":
            outcome = stages.exact(opened, chosen, memory_bytes, level)
        case "near":
            outcome = stages.near(opened, chosen, settings, memory_bytes, level)
        case "paragraphs":
            outcome = passage_stages.paragraphs(opened, chosen, settings, memory_bytes, level)
        case "substring":
            outcome = passage_stages.substring(opened, chosen, settings, memory_bytes, level)
        case _:
            outcome = passage_stages.decontaminate(opened, chosen, settings)
    untouched = [chunk for chunk in chunks if chunk not in chosen]
    return StageOutcome(outcome.stage, [*outcome.chunks, *untouched], outcome.reports, outcome.keys)


def _split_labels(opened: Executor, recipe: Recipe, chunks: list[Chunk]) -> Done | None:
    """Clusters for the splits: what says the same or nearly the same goes the same way.

    They are made of the documents as they are after all stages: what a stage cut may have made two of them alike, and
    the recipe may have looked for near-duplicates in some sources only, or less strictly, or not at all.
    """
    if recipe.splits.validation + recipe.splits.test == 0:
        return None
    return stages.alike(opened, chunks, near_settings({}), recipe.memory_bytes)


def account(outcome: StageOutcome) -> dict[str, Any]:
    """What a stage kept and dropped, by source."""
    sources: dict[str, dict[str, Any]] = {}
    for source, result in outcome.reports:
        figures = sources.setdefault(source, {"documents": 0, "text_bytes": 0, "dropped": {}, "licences": {}})
        figures["documents"] += result["documents"]
        figures["text_bytes"] += result["text_bytes"]
        for kind in _COUNTS:
            for name, count in result.get(kind, {}).items():
                counts = figures.setdefault(kind, {})
                counts[name] = counts.get(name, 0) + count
    return {"stage": outcome.stage, "sources": sources}


def _portable(recipe: Recipe) -> dict[str, Any]:
    """The recipe without the places of this machine: inputs are named by their origins and checksums."""
    plain: dict[str, Any] = to_mapping(recipe)
    for entry in plain["sources"]:
        entry["paths"] = [os.path.basename(path.rstrip("/")) for path in entry["paths"]]
    if recipe.tokenizer is not None:
        plain["tokenizer"] = os.path.basename(recipe.tokenizer.rstrip("/"))
    for stage in plain["stages"]:
        for name in file_settings(stage["use"]):
            given = stage["settings"].get(name)
            if given is not None:
                names = [os.path.basename(path.rstrip("/")) for path in ([given] if isinstance(given, str) else given)]
                stage["settings"][name] = names[0] if isinstance(given, str) else names
    return plain


class Counted:
    """An executor whose finished tasks move the progress bar."""

    def __init__(self, inner: Executor, bar: Progress) -> None:
        self._inner, self._bar = inner, bar

    def map(self, tasks: Any) -> Iterator[Done]:
        for done in self._inner.map(tasks):
            self._bar.advance()
            yield done


@contextmanager
def alone(out: str) -> Iterator[None]:
    """Two builds must not write one corpus at a time."""
    with open(os.path.join(out, ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another build is writing {out}", fix="wait for it, or choose another folder") from None
        yield
