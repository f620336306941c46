"""A recipe: the description of a corpus to build, as data (sources and amounts, stages, splits, licences, seed)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from piledriver.core import storage
from piledriver.core.config import build, load_config
from piledriver.core.config.yaml_tree import parse_override, parse_yaml
from piledriver.core.errors import UnknownNameError
from piledriver.corpus.pipeline.stage_registry import file_settings
from piledriver.corpus.sources import resolve


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """One source: its raw files and how much of it goes into training."""

    source: str
    """A slug or `pile_set_name`; `piledriver corpus sources` lists them."""
    paths: list[str]
    """Raw files, folders and archives."""
    epochs: float | None = None
    """How often the source is repeated in the training split (2.5: twice, and half of it a third time)."""
    weight: float | None = None
    """Its share of `total_bytes` or `total_tokens`, relative to the other weights."""
    bytes: int | None = None
    """A budget of text in bytes."""
    tokens: int | None = None
    """A budget of text in tokens of the recipe's tokenizer."""
    name: str | None = None
    """The `pile_set_name` of its documents, if not the source's own; entries of one source need different names."""

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
    """One filter or whole-corpus stage, by name."""

    use: str
    """The name of a filter, or of a stage: exact, near, paragraphs, substring, decontaminate (docs/corpus.md)."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Its settings that differ from the defaults."""
    sources: list[str] = field(default_factory=list)
    """Apply it to these sources only; empty for all."""


@dataclass(frozen=True, kw_only=True)
class Licences:
    """Which documents are kept, by the licence of each."""

    allow: list[str] = field(default_factory=list)
    """Keep only licences that match one of these patterns, in which * matches anything; empty for all."""
    refuse: list[str] = field(default_factory=list)
    """Drop licences that match one of these patterns."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Held-out splits, drawn at random by whole clusters of near-duplicates."""

    validation: float = 0.001
    """Share of documents in the validation split."""
    test: float = 0.001
    """Share of documents in the test split."""

    def __post_init__(self) -> None:
        if self.validation < 0 or self.test < 0 or self.validation + self.test >= 1:
            raise ValueError(
                f"splits are {self.validation} and {self.test}; they must not be negative and must be under 1 together"
            )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines a corpus, besides the content of its raw files."""

    name: str = "corpus"
    """Name of the corpus, in its manifest and card."""
    sources: list[SourceEntry]
    """Raw data and amounts."""
    stages: list[StageEntry] = field(default_factory=list)
    """Filters and whole-corpus stages, in order."""
    splits: Splits = field(default_factory=Splits)
    """Held-out shares."""
    licences: Licences = field(default_factory=Licences)
    """Licence rules."""
    total_bytes: int | None = None
    """Bytes of text in the training split, if sources have weights."""
    total_tokens: int | None = None
    """Tokens in the training split, if sources have weights; instead of `total_bytes`."""
    tokenizer: str | None = None
    """The tokenizer that counts tokens: a `tokenizer.json`, or a folder with one."""
    shard_bytes: int = 1 << 30
    """Approximate bytes of text in an output shard."""
    memory_bytes: int = 2 << 30
    """Bytes that one process may hold while it sorts."""
    seed: int = 42
    """Seed of splits, repetitions, shuffle, and of filters that draw."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("the recipe has no sources")
        names = [source_name(entry) for entry in self.sources]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))} is used twice as a name; give the entries different names")
        weighted = [entry.weight is not None for entry in self.sources]
        if any(weighted) and not all(weighted):
            raise ValueError("some sources have a weight and others do not; give all of them a weight, or none of them")
        if any(weighted) and (self.total_bytes is None) == (self.total_tokens is None):
            raise ValueError("sources have weights; give one of total_bytes and total_tokens")
        counted = self.total_tokens is not None or any(entry.tokens is not None for entry in self.sources)
        if counted and self.tokenizer is None:
            raise ValueError("a budget is in tokens but there is no tokenizer; add tokenizer: path/to/tokenizer.json")


def source_name(entry: SourceEntry) -> str:
    """Return the `pile_set_name` of an entry's documents: its own name, or the source's."""
    return entry.name or resolve(entry.source).name


def load_recipe(path_or_name: storage.Location, overrides: list[str] | None = None) -> Recipe:
    """Load a recipe from a YAML file, or a shipped recipe by its name; `overrides` are `key=value`.

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
    sources = [replace(entry, paths=[_absolute(path, base) for path in entry.paths]) for entry in recipe.sources]
    stages = [replace(stage, settings=_absolute_settings(stage, base)) for stage in recipe.stages]
    tokenizer = None if recipe.tokenizer is None else _absolute(recipe.tokenizer, base)
    return replace(recipe, sources=sources, stages=stages, tokenizer=tokenizer)


def _absolute_settings(stage: StageEntry, base: Path) -> dict[str, Any]:
    """Return the settings of a stage with absolute paths, for those that name files."""
    settings = dict(stage.settings)
    for name in file_settings(stage.use):
        given = settings.get(name)
        if isinstance(given, str):
            settings[name] = _absolute(given, base)
        elif isinstance(given, list):
            settings[name] = [_absolute(str(path), base) for path in given]
    return settings


def shipped_recipes() -> list[str]:
    """Return the names of the shipped recipes."""
    folder = resources.files("piledriver.corpus.pipeline") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _shipped(name: str) -> str:
    return (resources.files("piledriver.corpus.pipeline") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def _absolute(path: str, base: Path) -> str:
    return path if storage.is_remote(path) else str(base / Path(path).expanduser())
