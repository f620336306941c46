"""Build a corpus from a recipe: checksums and extract; the recipe's stages; splits, epochs and shuffle; publish.

Consecutive filters run in one pass over each chunk; other stages look at all chunks together. The manifest is written
last.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

from piledriver.core import storage
from piledriver.core.config import to_mapping
from piledriver.core.errors import PiledriverError, UnknownNameError, UsageError
from piledriver.core.progress import Progress, progress
from piledriver.corpus.filters import FILTERS
from piledriver.corpus.pipeline.chunks import DOCUMENTS
from piledriver.corpus.pipeline.executors import Executor, open_executor
from piledriver.corpus.pipeline.ledger import write_ledger
from piledriver.corpus.pipeline.manifest import MANIFEST, Manifest, versions
from piledriver.corpus.pipeline.recipe import Recipe, StageEntry, source_name
from piledriver.corpus.pipeline.stage_registry import StageInput, StageOutcome, file_settings, make_stage
from piledriver.corpus.pipeline.stages.extract import InputFile, checksum_inputs, extract_source
from piledriver.corpus.pipeline.stages.filter import run_filters
from piledriver.corpus.pipeline.stages.mix import mix
from piledriver.corpus.pipeline.tasks import Task, TaskResult, remove_partial_tasks
from piledriver.corpus.sources import resolve
from piledriver.corpus.text.token_counts import TokenCounter, tokenizer_file

WORK = ".work"
CHUNK_BYTES = 32 << 20
# What the tasks of a stage report by name and number, besides documents and bytes.
_COUNTS = ("dropped", "licences", "replaced", "removed", "hits")


def build_corpus(
    recipe: Recipe, out: str, *, executor_name: str = "local", workers: int = 1, chunk_bytes: int = CHUNK_BYTES
) -> Manifest:
    """Build a corpus in the folder `out`, or resume a build that was interrupted there.

    The published bytes are the same for any executor, number of workers, `chunk_bytes` (raw data that one task reads)
    and history of interruptions. An invalid recipe raises before any work.
    """
    check_recipe(recipe)
    storage.make_folder(out)
    with (
        lock_corpus(out),
        progress(f"build {recipe.name}", unit="tasks") as bar,
        open_executor(executor_name, work_in(out), workers) as opened,
    ):
        executor = CountedExecutor(opened, bar)
        inputs, extracted = _extract(executor, recipe, chunk_bytes, bar)
        outcomes = [extracted]
        for outcome in _run_stages(StageInput(executor, extracted.chunks, recipe.memory_bytes), recipe, bar):
            outcomes.append(outcome)
        if not outcomes[-1].chunks:
            raise PiledriverError("every document was dropped", fix="loosen the filters; the drops are counted above")
        bar.note("mix")
        shards, shares = mix(StageInput(executor, outcomes[-1].chunks, recipe.memory_bytes), recipe)
        storage.remove_file(os.path.join(out, MANIFEST))
        published = publish_shards(out, shards)
        ledger = write_ledger(out, outcomes)
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


def check_recipe(recipe: Recipe) -> None:
    """Raise for a recipe that names sources, stages, settings or files that do not exist."""
    names = {source_name(entry) for entry in recipe.sources}
    for source in recipe.sources:
        resolve(source.source)
    if recipe.tokenizer is not None:
        TokenCounter(tokenizer_file(recipe.tokenizer))
    for stage in recipe.stages:
        made = make_stage(stage.use, stage.settings)
        for name in file_settings(stage.use):
            given = getattr(made, name)
            for path in given if isinstance(given, list) else [given] if given is not None else []:
                if not os.path.exists(path):
                    raise UsageError(f"stage {stage.use}: {path} does not exist", fix=f"check its setting {name}")
        for name in stage.sources:
            if name not in names:
                raise UnknownNameError(f"source in stage {stage.use!r}:", name, names)


def _extract(
    executor: Executor, recipe: Recipe, chunk_bytes: int, bar: Progress
) -> tuple[list[InputFile], StageOutcome]:
    inputs: list[InputFile] = []
    whole = StageOutcome("extract")
    for entry in recipe.sources:
        name = source_name(entry)
        bar.note(f"extract {name}")
        files = checksum_inputs(executor, name, entry)
        inputs += files
        outcome = extract_source(executor, name, entry, files, chunk_bytes)
        whole.chunks.extend(outcome.chunks)
        whole.results.extend(outcome.results)
    return inputs, whole


def _run_stages(corpus: StageInput, recipe: Recipe, bar: Progress) -> Iterator[StageOutcome]:
    runs = [(is_filter, list(run)) for is_filter, run in groupby(recipe.stages, key=lambda stage: stage.use in FILTERS)]
    if not runs or not runs[0][0]:
        # Without filters at the beginning, a pass applies the licence rules.
        runs.insert(0, (True, []))
    for is_filter, entries in runs:
        if is_filter:
            bar.note("filter")
            outcome = run_filters(corpus, entries, recipe.licences, recipe.seed)
            yield outcome
            corpus = replace(corpus, chunks=outcome.chunks)
            continue
        for entry in entries:
            bar.note(entry.use)
            outcome = run_stage(corpus, entry)
            yield outcome
            corpus = replace(corpus, chunks=outcome.chunks)


def run_stage(corpus: StageInput, entry: StageEntry) -> StageOutcome:
    """Run one whole-corpus stage on the chunks of its sources; the others follow unchanged."""
    chosen = [chunk for chunk in corpus.chunks if not entry.sources or chunk.source in entry.sources]
    if not chosen:
        return StageOutcome(entry.use, corpus.chunks)
    outcome: StageOutcome = make_stage(entry.use, entry.settings)(replace(corpus, chunks=chosen))
    untouched = [chunk for chunk in corpus.chunks if chunk not in chosen]
    return StageOutcome(entry.use, [*outcome.chunks, *untouched], outcome.results)


def account(outcome: StageOutcome) -> dict[str, Any]:
    """Return what a stage kept and dropped, by source, for the manifest."""
    sources: dict[str, dict[str, Any]] = {}
    for source, result in outcome.results:
        figures = sources.setdefault(source, {"documents": 0, "text_bytes": 0, "dropped": {}, "licences": {}})
        figures["documents"] += result.values["documents"]
        figures["text_bytes"] += result.values["text_bytes"]
        for kind in _COUNTS:
            for name, count in result.values.get(kind, {}).items():
                counts = figures.setdefault(kind, {})
                counts[name] = counts.get(name, 0) + count
    return {"stage": outcome.stage, "sources": sources}


def _portable(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe without folders of this machine; inputs are identified by origin and checksum."""
    plain: dict[str, Any] = to_mapping(recipe)
    for entry in plain["sources"]:
        entry["paths"] = _base_names(entry["paths"])
    if recipe.tokenizer is not None:
        (plain["tokenizer"],) = _base_names([recipe.tokenizer])
    for stage in plain["stages"]:
        for name in file_settings(stage["use"]):
            given = stage["settings"].get(name)
            if given is not None:
                names = _base_names([given] if isinstance(given, str) else given)
                stage["settings"][name] = names[0] if isinstance(given, str) else names
    return plain


def _base_names(paths: Sequence[str]) -> list[str]:
    return [os.path.basename(path.rstrip("/")) for path in paths]


def publish_shards(out: str, shards: dict[str, list[TaskResult]]) -> list[dict[str, Any]]:
    """Place shards at `split/NNNNN.jsonl.zst` and remove older ones; return their lines for the manifest."""
    for name in os.listdir(out):
        if name.endswith(".partial"):  # of a ledger or manifest whose writing was interrupted
            os.unlink(os.path.join(out, name))
    published = []
    for split, results in shards.items():
        folder = os.path.join(out, split)
        os.makedirs(folder, exist_ok=True)
        names = [f"{number:05d}.jsonl.zst" for number in range(len(results))]
        for name in set(os.listdir(folder)) - set(names):
            os.unlink(os.path.join(folder, name))
        for name, result in zip(names, results, strict=True):
            _place(result.path(DOCUMENTS), os.path.join(folder, name))
            published.append({"path": f"{split}/{name}", "split": split, **result.values})
        storage.fsync_folder(folder)
    return published


def _place(source: str, target: str) -> None:
    """Hard-link a file where the file system can, copy it where it cannot; atomic."""
    partial = f"{target}.partial"
    if os.path.exists(partial):
        os.unlink(partial)
    try:
        os.link(source, partial)
    except OSError:
        shutil.copyfile(source, partial)
    os.replace(partial, target)
    # If the target is a link to the same file already, `replace` leaves both names.
    with suppress(FileNotFoundError):
        os.unlink(partial)


class CountedExecutor:
    """An executor whose finished tasks advance a progress bar."""

    def __init__(self, inner: Executor, bar: Progress) -> None:
        self._inner, self._bar = inner, bar

    def map(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """See `Executor`."""
        for result in self._inner.map(tasks):
            self._bar.advance()
            yield result


def work_in(out: str) -> str:
    """Return the work folder of a corpus, without what interrupted tasks left. The corpus is locked."""
    work = os.path.join(os.path.abspath(out), WORK)
    remove_partial_tasks(work)
    return work


@contextmanager
def lock_corpus(out: str) -> Iterator[None]:
    """Keep other builds from writing the same corpus."""
    with open(os.path.join(out, ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another build is writing {out}", fix="wait for it, or choose another folder") from None
        yield
