"""Presets by name. Other packages add theirs through the entry-point group `piledriver.model_preset`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

from piledriver.core.config import from_mapping
from piledriver.core.registry import Registry
from piledriver.models.config import ModelConfig


def _read_table() -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for file in resources.files("piledriver.models.presets").iterdir():
        if file.name.endswith(".yaml"):
            shapes = yaml.safe_load(file.read_text(encoding="utf-8"))
            found |= {name: {**shapes["common"], **size} for name, size in shapes["sizes"].items()}
    return found


PRESETS: Registry[Mapping[str, Any]] = Registry("model_preset", read_table=_read_table)
"""The fields of a `ModelConfig` by preset. A file has what its shapes share (`common`) and what differs (`sizes`)."""


def preset_names() -> list[str]:
    """Return the name of every preset, sorted."""
    return list(PRESETS)


def preset(name: str, **changes: Any) -> ModelConfig:
    """Return the config of a preset, with some fields changed.

    >>> preset("gpt2").layers, preset("gpt2", layers=2).layers
    (12, 2)
    """
    return from_mapping(ModelConfig, {**PRESETS[name], **changes}, where=f"preset {name}")
