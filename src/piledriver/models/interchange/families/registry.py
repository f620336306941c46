"""Families by `model_type`. Other packages add theirs through the entry-point group `piledriver.model_family`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Literal

import yaml

from piledriver.core.config import from_mapping
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
    config: dict[str, str]
    """Our config field: their key. A dot descends into our nested config."""
    constants: dict[str, Any]
    """Config fields that the family fixes."""
    weights: dict[str, list[str]]
    """Our parameter: [operation of `tensors.py`, their tensors...]. {i} is the block, {e} the expert."""
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Their value where a config.json leaves a key out."""
    writes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Their keys that are written on export and never read."""
    refuses: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Their keys and values that cannot be represented: such checkpoints are rejected."""
    ignore: list[str] = dataclasses.field(default_factory=list)
    """Their tensors that hold no weight (regular expressions)."""
    window: Literal["none", "all", "by_layer"] = "none"
    """Whether attention slides over a window: never, in all blocks, or in some."""
    partial_rotary: bool = False
    """Whether `transformers` rotates only a part of each head where the config asks for it."""
    rope_keys: dict[str, str] = dataclasses.field(
        default_factory=lambda: {"rope_theta": "rope_theta", "rope_fraction": "rotary_pct"}
    )
    """Their keys of rotary settings before transformers 5 gathered these in `rope_parameters`."""


def _read_table() -> dict[str, Mapping[str, Any] | Traversable]:
    folder = resources.files("piledriver.models.interchange.families")
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}


FAMILIES: Registry[Mapping[str, Any] | Traversable] = Registry("model_family", read_table=_read_table)
"""The fields of a `Family`, as a mapping or as a YAML file (a `pathlib.Path` or a package resource)."""


@functools.cache
def family(model_type: str) -> Family:
    """Return one family; raises `UnknownFamilyError`, which lists the families.

    >>> family("mixtral").architecture
    'MixtralForCausalLM'
    """
    if model_type not in FAMILIES:
        raise UnknownFamilyError(model_type)
    return from_mapping(Family, {"name": model_type, **_fields(model_type)}, where=f"model family {model_type}")


def families() -> dict[str, Family]:
    """Return every family by its `model_type`, ours first."""
    ours = _read_table()
    return {name: family(name) for name in sorted(FAMILIES, key=lambda name: name not in ours)}


def _fields(model_type: str) -> dict[str, Any]:
    found = FAMILIES[model_type]
    given = dict(found if isinstance(found, Mapping) else yaml.safe_load(found.read_text(encoding="utf-8")))
    base = given.pop("extends", None)
    if base is None:
        return given
    fields = _fields(base)
    for name, value in given.items():
        if isinstance(value, Mapping) and name in fields:
            merged = {**fields[name], **value}
            value = {key: kept for key, kept in merged.items() if kept is not None}
        fields[name] = value
    return fields
