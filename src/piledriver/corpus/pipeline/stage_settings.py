"""What a recipe's stage names: a filter, or a stage that looks at the whole corpus; its settings; the files it reads.

A task's key must follow the content of what it reads. So where a setting names a file (a block list, a model), the
task's arguments hold the file's checksum in its place, and the path travels beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from piledriver.core import storage
from piledriver.core.config import from_mapping
from piledriver.core.errors import PiledriverError, UnknownNameError, UsageError
from piledriver.corpus.dedup.contamination import DecontaminationSettings
from piledriver.corpus.dedup.minhash import PRESETS, MinHashSettings
from piledriver.corpus.dedup.paragraphs import ParagraphSettings
from piledriver.corpus.dedup.substring import SubstringSettings
from piledriver.corpus.filters import FILTERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactSettings:
    """Whole documents that are equal but for case and spacing: there is nothing to set."""


WHOLE_CORPUS: dict[str, type] = {
    "exact": ExactSettings,
    "near": MinHashSettings,
    "paragraphs": ParagraphSettings,
    "substring": SubstringSettings,
    "decontaminate": DecontaminationSettings,
}


def stage_settings(use: str, settings: Mapping[str, Any]) -> Any:
    """The settings of a stage, checked."""
    if use == "near":
        return near_settings(settings)
    if use in WHOLE_CORPUS:
        return from_mapping(WHOLE_CORPUS[use], settings, f"stage {use}")
    if use in FILTERS:
        return from_mapping(FILTERS[use], settings, f"stage {use}")
    raise UnknownNameError("stage", use, [*FILTERS, *WHOLE_CORPUS])


def near_settings(settings: Mapping[str, Any]) -> MinHashSettings:
    """Settings of the near stage: a preset, with what differs."""
    given = dict(settings)
    preset = given.pop("preset", "piledriver")
    if preset not in PRESETS:
        raise UsageError(f"near: unknown preset {preset!r}", fix=f"choose from {', '.join(PRESETS)}")
    return from_mapping(MinHashSettings, {**dataclasses.asdict(PRESETS[preset]), **given}, "near")


def file_settings(use: str) -> tuple[str, ...]:
    """Which settings of a stage name files."""
    if use in WHOLE_CORPUS:
        return tuple(getattr(WHOLE_CORPUS[use], "FILES", ()))
    return tuple(getattr(FILTERS[use], "FILES", ())) if use in FILTERS else ()


def by_content(use: str, settings: Mapping[str, Any], seed: int) -> tuple[dict[str, Any], dict[str, str]]:
    """(a filter's settings with checksums in place of paths and the recipe's seed where it takes one, the paths)."""
    kind: Any = FILTERS[use]
    keyed, places = dict(settings), {}
    if any(known.name == "seed" for known in dataclasses.fields(kind)):
        keyed.setdefault("seed", seed)
    for name in file_settings(use):
        if keyed.get(name) is not None:
            checksum = storage.sha256(keyed[name])
            places[checksum] = str(keyed[name])
            keyed[name] = checksum
    return keyed, places


def by_path(use: str, settings: Mapping[str, Any], places: Mapping[str, str] | None) -> dict[str, Any]:
    """What `by_content` was given, after a check that the files are still the same."""
    plain = dict(settings)
    for name in file_settings(use):
        if plain.get(name) is not None:
            plain[name] = unchanged((places or {})[plain[name]], plain[name])
    return plain


def unchanged(path: str, checksum: str) -> str:
    """The path of a file that still has this checksum."""
    if storage.sha256(path) != checksum:
        raise PiledriverError(f"{path} changed while the corpus was built", fix="run the build again")
    return path
