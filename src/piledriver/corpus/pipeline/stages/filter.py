"""Filter: licences and a run of filters, in one pass over each chunk.

A task's key must change with the content of the files that a filter reads. So where a setting names a file (a block
list, a model), the task's arguments hold the file's checksum, and the path is in its payload.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from piledriver.core import storage
from piledriver.core.errors import PiledriverError
from piledriver.corpus.document import Document
from piledriver.corpus.filters import FILTERS, Drop, Filter
from piledriver.corpus.pipeline.chunks import Dropped, read_chunk, write_chunk
from piledriver.corpus.pipeline.recipe import Licences, StageEntry
from piledriver.corpus.pipeline.stage_registry import StageInput, StageOutcome, file_settings, make_stage
from piledriver.corpus.pipeline.tasks import Task


def run_filters(corpus: StageInput, entries: Sequence[StageEntry], licences: Licences, seed: int) -> StageOutcome:
    """Apply the licence rules, then some filters in order, each to the documents of its sources."""
    hashed = [(entry, *hash_files(entry.use, entry.settings, seed)) for entry in entries]

    def tasks() -> Iterator[Task]:
        for chunk in corpus.chunks:
            chosen = [item for item in hashed if not item[0].sources or chunk.source in item[0].sources]
            filters = [{"use": entry.use, "settings": settings} for entry, settings, _ in chosen]
            paths = {checksum: path for *_, found in chosen for checksum, path in found.items()}
            rules = {"allow": licences.allow, "refuse": licences.refuse}
            yield Task.call(filter_chunk, chunk=chunk.key, filters=filters, **rules, payload=paths or None)

    return corpus.rewrite("filter", tasks())


def hash_files(use: str, settings: Mapping[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (a filter's settings with checksums in place of paths, the path of each checksum).

    A filter with a setting `seed` gets the recipe's unless it has its own.
    """
    keyed, paths = dict(settings), {}
    fields: Any = FILTERS[use]
    if any(known.name == "seed" for known in dataclasses.fields(fields)):
        keyed.setdefault("seed", seed)
    for name in file_settings(use):
        if keyed.get(name) is not None:
            checksum = storage.sha256(keyed[name])
            paths[checksum] = str(keyed[name])
            keyed[name] = checksum
    return keyed, paths


def filter_chunk(
    folder: str,
    chunk: str,
    filters: list[dict[str, Any]],
    allow: list[str],
    refuse: list[str],
    payload: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Write one chunk without the documents that a licence rule or a filter drops (a task)."""
    judges = [
        (entry["use"], make_stage(entry["use"], _with_paths(entry["use"], entry["settings"], payload or {})))
        for entry in filters
    ]

    def judged() -> Iterator[Document | Dropped]:
        for document in read_chunk(folder, chunk):
            licence = str(document.meta.get("licence", "unknown"))
            if not licence_allowed(licence, allow, refuse):
                yield Dropped(document.id, document.source, "licence", "licence not allowed", licence)
            else:
                yield _judge(document, judges)

    return write_chunk(folder, judged())


def _with_paths(use: str, settings: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, Any]:
    """Undo `hash_files`, after a check that the files are still the same."""
    plain = dict(settings)
    for name in file_settings(use):
        if plain.get(name) is not None:
            plain[name] = check_unchanged(paths[plain[name]], plain[name])
    return plain


def check_unchanged(path: str, checksum: str) -> str:
    """Return the path of a file that still has this checksum."""
    if storage.sha256(path) != checksum:
        raise PiledriverError(f"{path} changed while the corpus was built", fix="run the build again")
    return path


def _judge(document: Document, filters: list[tuple[str, Filter]]) -> Document | Dropped:
    kept = document
    for use, judge in filters:
        verdict = judge(kept)
        if isinstance(verdict, Drop):
            return Dropped(document.id, document.source, use, verdict.reason, verdict.detail)
        kept = verdict
    return kept


def licence_allowed(licence: str, allow: list[str], refuse: list[str]) -> bool:
    """Return whether a licence matches one of the allowed patterns (or there are none) and no refused one.

    >>> licence_allowed("CC-BY-4.0", ["CC-BY-*", "CC0-*"], ["CC-BY-NC*"])
    True
    """

    def matches(patterns: list[str]) -> bool:
        return any(fnmatchcase(licence.lower(), pattern.lower()) for pattern in patterns)

    return (not allow or matches(allow)) and not matches(refuse)
