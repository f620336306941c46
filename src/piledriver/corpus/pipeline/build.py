"""Build a corpus from a recipe: checksums and extract; the recipe's stages; splits, epochs and shuffle; publish.

Consecutive filters run in one pass over each chunk; other stages look at all chunks together. The manifest is written
last.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from typing import Any, TextIO

from piledriver.core import storage
from piledriver.core.config import to_mapping
from piledriver.core.errors import MissingFileError, PiledriverError, UnknownNameError, UsageError
from piledriver.core.progress import Progress, progress
from piledriver.corpus.filters import FILTERS
from piledriver.corpus.pipeline.chunks import DOCUMENTS
from piledriver.corpus.pipeline.executors import Executor, open_executor
from piledriver.corpus.pipeline.ledger import write_ledger
from piledriver.corpus.pipeline.manifest import MANIFEST, Manifest, finished_manifest, versions
from piledriver.corpus.pipeline.recipe import Recipe, StageEntry, source_name
from piledriver.corpus.pipeline.stage_registry import StageInput, StageOutcome, file_settings, make_stage
from piledriver.corpus.pipeline.stages.extract import InputFile, checksum_inputs, extract_source
from piledriver.corpus.pipeline.stages.filter import run_filters
from piledriver.corpus.pipeline.stages.mix import mix
from piledriver.corpus.pipeline.tasks import Task, TaskResult, has_documents, remove_partial_tasks
from piledriver.corpus.raw.streams import local_files
from piledriver.corpus.sources import resolve
from piledriver.corpus.sources.base import Source
from piledriver.corpus.text.token_counts import TokenCounter, tokenizer_checksum

WORK = ".work"
CHUNK_BYTES = 32 << 20
# What the tasks of a stage report by name and number, besides documents and bytes.
_COUNTS = ("dropped", "licences", "replaced", "removed", "hits")


def build_corpus(
    recipe: Recipe,
    out: str,
    *,
    executor_name: str = "local",
    workers: int = 1,
    chunk_bytes: int = CHUNK_BYTES,
    keep_work: bool = False,
) -> Manifest:
    """Build a corpus in the folder `out`, or resume a build that was interrupted there.

    The published bytes are the same for any executor, number of workers, `chunk_bytes` (raw data that one task reads)
    and history of interruptions. An invalid recipe raises before any work. A finished corpus is returned as it is if
    recipe and raw files are unchanged. `keep_work` keeps the intermediate files, so that a build with another recipe
    or more raw files runs only what changed.
    """
    check_recipe(recipe)
    for path, source in missing_inputs(recipe):
        raise MissingFileError(path, fix=f"put there {source.raw_format}, or change the paths of {source.slug}")
    with (
        lock_corpus(out) as lock,
        work_in(out, keep=keep_work) as work,
        progress(f"build {recipe.name}", unit="tasks") as bar,
        open_executor(executor_name, work, workers) as opened,
    ):
        executor = CountedExecutor(opened, bar)
        inputs = {source_name(entry): checksum_inputs(executor, source_name(entry), entry) for entry in recipe.sources}
        key = _build_key(recipe, inputs)
        manifest = finished_manifest(out, key)
        if manifest is not None:
            return manifest
        extracted = _extract(executor, recipe, inputs, chunk_bytes, bar)
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
                {"source": file.source, "origin": file.origin, "size": file.size, "sha256": file.sha256}
                for files in inputs.values()
                for file in files
            ],
            stages=[account(outcome) for outcome in outcomes],
            mix={name: share.account() for name, share in shares.items()},
            outputs=[*published, ledger],
            key=key,
        )
        lock.check()
        manifest.save(out)
    return manifest


def _build_key(recipe: Recipe, inputs: Mapping[str, Sequence[InputFile]]) -> str:
    """Return a hash of everything that determines the corpus: recipe, versions, and the content of all files."""
    files = [[name, file.origin, file.sha256] for name, found in inputs.items() for file in found]
    read_by_stages = [
        [origin, storage.sha256(path)]
        for stage in recipe.stages
        for path, origin, _ in local_files(_stage_files(stage))
    ]
    counter = None if recipe.tokenizer is None else tokenizer_checksum(recipe.tokenizer)
    return (
        Task("build", {"recipe": _portable(recipe), "versions": versions(), "files": files}).key
        + Task("files", {"stages": read_by_stages, "tokenizer": counter}).key
    )


def _stage_files(stage: StageEntry) -> list[str]:
    """Return the paths of the files that a stage's settings name."""
    made = make_stage(stage.use, stage.settings)
    given = [getattr(made, name) for name in file_settings(stage.use)]
    return [path for value in given if value is not None for path in (value if isinstance(value, list) else [value])]


def missing_inputs(recipe: Recipe) -> list[tuple[str, Source]]:
    """Return (path, source) of raw files and folders of a recipe that do not exist."""
    entries = ((path, entry) for entry in recipe.sources for path in entry.paths)
    return [(path, resolve(entry.source)) for path, entry in entries if not os.path.lexists(path)]


def check_recipe(recipe: Recipe) -> None:
    """Raise for a recipe that names sources, stages, settings or files that do not exist."""
    names = {source_name(entry) for entry in recipe.sources}
    for source in recipe.sources:
        resolve(source.source)
    if recipe.tokenizer is not None:
        TokenCounter(recipe.tokenizer)
    for stage in recipe.stages:
        for path in _stage_files(stage):
            if not os.path.exists(path):
                names_of = ", ".join(file_settings(stage.use))
                raise UsageError(f"stage {stage.use}: {path} does not exist", fix=f"check its setting {names_of}")
        for name in stage.sources:
            if name not in names:
                raise UnknownNameError(f"source in stage {stage.use!r}:", name, names)


def _extract(
    executor: Executor, recipe: Recipe, inputs: Mapping[str, Sequence[InputFile]], chunk_bytes: int, bar: Progress
) -> StageOutcome:
    whole = StageOutcome("extract")
    for entry in recipe.sources:
        name = source_name(entry)
        bar.note(f"extract {name}")
        outcome = extract_source(executor, name, entry, inputs[name], chunk_bytes)
        whole.chunks.extend(outcome.chunks)
        whole.results.extend(outcome.results)
    return whole


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


@contextmanager
def work_in(out: str, *, keep: bool = False) -> Iterator[str]:
    """Yield the work folder of a locked corpus, without what interrupted tasks left.

    It is removed at the end, unless `keep`, and after an error that came before any document was read.
    """
    work = os.path.join(os.path.abspath(out), WORK)
    remove_partial_tasks(work)
    try:
        yield work
    except BaseException:
        if not has_documents(work):
            shutil.rmtree(work, ignore_errors=True)
        raise
    if not keep:
        shutil.rmtree(work, ignore_errors=True)


class CorpusLock:
    """The lock of a corpus folder, which also tells whether the folder is still there."""

    def __init__(self, out: str, file: TextIO) -> None:
        self._out, self._file = out, file

    def check(self, error: BaseException | None = None) -> None:
        """Raise if the corpus folder was removed."""
        if not os.fstat(self._file.fileno()).st_nlink:
            raise PiledriverError(f"{self._out} was removed during the build", fix="run the build again") from error


@contextmanager
def lock_corpus(out: str) -> Iterator[CorpusLock]:
    """Keep other builds from writing the same corpus. A folder that is made and stays empty is removed again."""
    path, is_new = os.path.join(out, ".lock"), not os.path.exists(out)
    storage.make_folder(out)
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another build is writing {out}", fix="wait for it, or choose another folder") from None
        lock = CorpusLock(out, file)
        try:
            yield lock
        except Exception as error:
            lock.check(error)
            raise
        finally:
            if is_new and os.path.exists(out) and os.listdir(out) == [".lock"]:
                shutil.rmtree(out, ignore_errors=True)
