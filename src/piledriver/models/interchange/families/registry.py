"""Families by `model_type`. Other packages add theirs through the entry-point group `piledriver.model_family`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Literal

from piledriver.core.config import from_mapping, load_yaml
from piledriver.core.errors import UsageError
from piledriver.core.registry import Registry


class UnknownFamilyError(UsageError):
    """A `model_type` that no family reads. Similar names are other architectures, so none is suggested."""

    def __init__(self, model_type: str) -> None:
        super().__init__(
            f"a transformers checkpoint of model_type {model_type!r} cannot become a Transformer",
            fix=f"use one of {', '.join(FAMILIES)}, or load it with transformers and train it through an Accelerator",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What one family of checkpoints calls things. A file holds these fields, without `name`.

    `extends: llama` takes the fields of another family; mappings are merged key by key, and null removes a key.
    """

    name: str
    """The `model_type` in config.json."""
    architecture: str
    """The class in `transformers`."""
    prefix: str
    """What checkpoints of the bare base model leave out of tensor names."""
    config: dict[str, Any]
    """Our config field: their key, or [conversion of `conversions.py`, its arguments...]. A dot descends into our
    nested config."""
    constants: dict[str, Any]
    """Config fields that the family fixes."""
    weights: dict[str, list[str]]
    """Our parameter: [operation of `tensors.py`, their tensors...]. {i} is the block, {e} stands
    for every expert, {h} for every head and {k} for every key-value head."""
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    """Other names of their keys: the alias to the key that `config` names."""
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Their value where a config.json leaves a key out."""
    writes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Their keys that are written on export and never read."""
    refuses: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Their keys and values that cannot be represented: such checkpoints are rejected."""
    requires: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Their keys that must be null or have this value ($key: the value of another key)."""
    ignore: list[str] = dataclasses.field(default_factory=list)
    """Their tensors that are not read (regular expressions); {layers} is the number of blocks."""
    window: Literal["none", "all", "flag", "by_layer", "pattern", "no_rope", "attention_types"] = "none"
    """Where attention slides over a window: nowhere; in all blocks, or in all with `use_sliding_window`; from block
    `max_window_layers` on; in all but every `window_pattern`-th; by rotation; as `attention_types` lists them. A list
    `layer_types` takes precedence."""
    window_pattern: int = 1
    window_key: str = "sliding_window"
    """Their key of the window's length; `attention_chunk_size` means chunks."""
    no_rope: Literal["none", "full_attention"] = "none"
    """Whether blocks with full attention have no rotary positions, where others have a window."""
    partial_rotary: bool = False
    """Whether `transformers` rotates only a part of each head where the config asks for it."""
    rope_keys: dict[str, str] = dataclasses.field(
        default_factory=lambda: {"rope_theta": "rope_theta", "rope_fraction": "rotary_pct"}
    )
    """Their keys of rotary settings before transformers 5 gathered these in `rope_parameters`."""
    rope_types: dict[str, str] = dataclasses.field(default_factory=dict)
    """Other names of rotary scalings: theirs to ours."""
    rope_by_type: bool = False
    """Whether `rope_parameters` has one entry for blocks with full attention and one for windowed blocks."""
    when: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of a variant: the keys and values of a config.json that choose it."""
    variants: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Fields that differ, for a config.json with the keys of `when`; the first that fits is taken."""


def _read_table() -> dict[str, Mapping[str, Any] | Traversable]:
    folder = resources.files("piledriver.models.interchange.families")
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}


FAMILIES: Registry[Mapping[str, Any] | Traversable] = Registry("model_family", read_table=_read_table)
"""The fields of a `Family`, as a mapping or as a YAML file (a `pathlib.Path` or a package resource)."""


_MOST_READ = ("gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi3", "qwen2", "qwen3")
"""A new model is written as the first of these that can express it."""


@functools.cache
def family(model_type: str) -> Family:
    """Return one family; raises `UnknownFamilyError`, which lists the families.

    >>> family("mixtral").architecture
    'MixtralForCausalLM'
    """
    if model_type not in FAMILIES:
        raise UnknownFamilyError(model_type)
    return from_mapping(Family, {"name": model_type, **_fields(model_type)}, where=f"model family {model_type}")


def family_names() -> list[str]:
    """Return the `model_type` of every family: those that most programs read first, then ours, then others'."""
    ours = _read_table()
    return sorted(FAMILIES, key=lambda name: (name not in _MOST_READ, name not in ours))


def family_of(theirs: Mapping[str, Any]) -> Family:
    """Return the family, or its variant, of the content of a `config.json`."""
    if not theirs.get("model_type"):
        raise UsageError(
            "config.json has no model_type", fix="save the model with transformers again, or add its model_type"
        )
    base = family(str(theirs["model_type"]))
    known = with_defaults(base, theirs)
    return next(
        (one for one in variants_of(base) if all(known.get(key) == value for key, value in one.when.items())), base
    )


def with_defaults(kind: Family, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json under the keys of `config`; null is a value, so only keys that are absent get a default."""
    named = {kind.aliases.get(key, key): value for key, value in theirs.items()}
    return {**kind.defaults, **named}


def variants_of(base: Family) -> list[Family]:
    """Return the variants of a family in the order in which they are tried; the family itself if it has none."""
    return list(_variants(base.name)) if base.variants and not base.when else [base]


@functools.cache
def _variants(model_type: str) -> tuple[Family, ...]:
    fields = _fields(model_type)
    return tuple(
        from_mapping(
            Family,
            {"name": model_type, **_merged(fields, variant), "variants": []},
            where=f"variant {number} of model family {model_type}",
        )
        for number, variant in enumerate(fields["variants"])
    )


def _fields(model_type: str) -> dict[str, Any]:
    found = FAMILIES[model_type]
    given = dict(found if isinstance(found, Mapping) else load_yaml(found.read_text(encoding="utf-8")))
    base = given.pop("extends", None)
    return given if base is None else _merged(_fields(base), given)


def _merged(fields: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields with some replaced; mappings are merged key by key, and null removes a key."""
    result = dict(fields)
    for name, value in given.items():
        if isinstance(value, Mapping) and name in result:
            merged = {**result[name], **value}
            value = {key: kept for key, kept in merged.items() if kept is not None}
        result[name] = value
    return result
