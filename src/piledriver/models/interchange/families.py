"""The table of families, as data."""

from __future__ import annotations

import dataclasses
import functools
from importlib import resources
from typing import Any, Literal

import yaml

from piledriver.core.errors import UnknownNameError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One entry of `families.yaml`, where each field is explained."""

    name: str
    architecture: str
    prefix: str
    config: dict[str, str]
    constants: dict[str, Any]
    weights: dict[str, list[str]]
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    writes: dict[str, Any] = dataclasses.field(default_factory=dict)
    refuses: dict[str, Any] = dataclasses.field(default_factory=dict)
    ignore: list[str] = dataclasses.field(default_factory=list)
    window: Literal["none", "all", "by_layer"] = "none"


@functools.cache
def families() -> dict[str, Family]:
    """Every family by its `model_type`."""
    text = (resources.files("piledriver.models.interchange") / "families.yaml").read_text(encoding="utf-8")
    return {name: Family(name=name, **entry) for name, entry in yaml.safe_load(text).items()}


def family(model_type: str) -> Family:
    """One family, or an error that names those we know.

    >>> family("mixtral").architecture
    'MixtralForCausalLM'
    """
    if model_type not in families():
        raise UnknownNameError("model_type of a transformers checkpoint", model_type, families())
    return families()[model_type]
