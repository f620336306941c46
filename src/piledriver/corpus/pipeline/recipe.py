"""What corpus to build, as data: sources with their shares, stages with their settings, splits, licences, seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from piledriver.core import storage
from piledriver.core.config import build, from_mapping, load_config
from piledriver.core.errors import UnknownNameError
from piledriver.core.yaml_tree import parse_override, parse_yaml
from piledriver.corpus.pipeline.stage_settings import file_settings
from piledriver.corpus.sources import resolve


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """One source: where its raw files are and how much of it goes in."""

    source: str
    """A slug or pile_set_name."""
    paths: list[str]
    """Raw files, folders and archives."""
    epochs: float | None = None
    """How many times the whole source goes into the training split (2.5: twice, and half of it a third time)."""
    weight: float | None = None
    """Its share of `total_bytes` or `total_tokens`, relative to the other weights."""
    bytes: int | None = None
    """A budget of text in bytes."""
    tokens: int | None = None
    """A budget of text in tokens of the recipe's tokenizer."""
    name: str | None = None
    """Call it by another pile_set_name; two entries of one source need different names."""

    def __post_init__(self) -> None:
        amounts = ("epochs", "weight", "bytes", "tokens")
        given = [key for key in amounts if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"source {self.source!r} has {' and '.join(given)}; give one of {', '.join(amounts)}")
        for key in given:
            if getattr(self, key) < 0:
                raise ValueError(f"source {self.source!r}: {key} is {getattr(self, key)}; it must not be negative")


@dataclass(frozen=True, kw_only=True)
class StageEntry:
    """One step over the documents: a filter, a deduplication or a decontamination, by name."""

    use: str
    """A filter's name (docs/corpus.md has them all), or exact, near, paragraphs, substring, decontaminate."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What differs from its defaults."""
    sources: list[str] = field(default_factory=list)
    """Only these sources; empty for all."""


@dataclass(frozen=True, kw_only=True)
class Licences:
    """Which documents may be used, by the licence that each carries."""

    allow: list[str] = field(default_factory=list)
    """If given, only these (a trailing * matches any ending)."""
    refuse: list[str] = field(default_factory=list)
    """Never these."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Shares of the documents that are held out, drawn at random by whole clusters of near-duplicates."""

    validation: float = 0.001
    """Share of documents in the validation split."""
    test: float = 0.001
    """Share of documents in the test split."""

    def __post_init__(self) -> None:
        if self.validation < 0 or self.test < 0 or self.validation + self.test >= 1:
            raise ValueError(
                f"splits are {self.validation} and {self.test}; they must be positive and under 1 together"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole corpus."""

    name: str = "corpus"
    """Name of the corpus, in its manifest and card."""
    sources: list[SourceEntry]
    stages: list[StageEntry] = field(default_factory=list)
    splits: Splits = field(default_factory=Splits)
    licences: Licences = field(default_factory=Licences)
    total_bytes: int | None = None
    """The size of the training split where sources have weights."""
    total_tokens: int | None = None
    """The same in tokens."""
    tokenizer: str | None = None
    """What tokens are counted by: a `tokenizer.json`, or a folder with one."""
    shard_bytes: int = 1 << 30
    """About so much text in an output shard."""
    memory_bytes: int = 2 << 30
    """What one process may hold while sorting."""
    seed: int = 42
    """Seed of splits, order and sampling."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("the recipe has no sources")
        names = [source_name(entry) for entry in self.sources]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))} is there twice; give the entries different names")
        weighted = [entry.weight is not None for entry in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError("some sources have weights and some have not; give all of them a weight, or none")
        if any(weighted) and (self.total_bytes is None) == (self.total_tokens is None):
            raise ValueError("sources have weights; give one of total_bytes and total_tokens")
        counted = self.total_tokens is not None or any(entry.tokens is not None for entry in self.sources)
        if counted and self.tokenizer is None:
            raise ValueError("a budget is in tokens but no tokenizer is given; add tokenizer: path/to/tokenizer.json")


def source_name(entry: SourceEntry) -> str:
    """What the documents of an entry are called: its own name, or the source's `pile_set_name`."""
    return entry.name or resolve(entry.source).name


def load_recipe(path_or_name: storage.Location, overrides: list[str] | None = None) -> Recipe:
    """A recipe from a YAML file, or one that we ship by its name.

    Paths in a file are relative to that file; those of a shipped recipe to the current folder.
    """
    if (
        not storage.exists(path_or_name)
        and "/" not in str(path_or_name)
        and not str(path_or_name).endswith((".yaml", ".yml"))
    ):
        shipped = shipped_recipes()
        if path_or_name not in shipped:
            raise UnknownNameError("recipe", str(path_or_name), shipped)
        tree = parse_yaml(_shipped(str(path_or_name)), f"recipe {path_or_name}")
        for override in overrides or []:
            tree.put(*parse_override(override))
        return build(Recipe, tree)
    recipe = load_config(Recipe, path_or_name, overrides or [])
    base = Path(path_or_name).resolve().parent
    entries = [
        from_mapping(SourceEntry, {**vars(entry), "paths": [_relative(path, base) for path in entry.paths]})
        for entry in recipe.sources
    ]
    stages = [from_mapping(StageEntry, {**vars(stage), "settings": _placed(stage, base)}) for stage in recipe.stages]
    tokenizer = None if recipe.tokenizer is None else _relative(recipe.tokenizer, base)
    return from_mapping(Recipe, {**vars(recipe), "sources": entries, "stages": stages, "tokenizer": tokenizer})


def _placed(stage: StageEntry, base: Path) -> dict[str, Any]:
    """Settings of a stage with the files that they name relative to the recipe."""
    settings = dict(stage.settings)
    for name in file_settings(stage.use):
        given = settings.get(name)
        if isinstance(given, str):
            settings[name] = _relative(given, base)
        elif isinstance(given, list):
            settings[name] = [_relative(str(path), base) for path in given]
    return settings


def shipped_recipes() -> list[str]:
    """The names of the recipes that come with the package."""
    folder = resources.files("piledriver.corpus.pipeline") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _shipped(name: str) -> str:
    return (resources.files("piledriver.corpus.pipeline") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def _relative(path: str, base: Path) -> str:
    return path if storage.is_remote(path) else str(base / Path(path).expanduser())
