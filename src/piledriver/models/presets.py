"""Known shapes by name, from the data files in `shapes/`: one per family, what is common and what differs by size."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import yaml

from piledriver.core.config import from_mapping
from piledriver.core.errors import UnknownNameError
from piledriver.models.config import ModelConfig


def preset_names() -> list[str]:
    """Every preset, sorted."""
    return sorted(_presets())


def preset(name: str, **changes: Any) -> ModelConfig:
    """The config of a preset, with some fields changed.

    >>> preset("gpt2").layers, preset("gpt2", layers=2).layers
    (12, 2)
    """
    known = _presets()
    if name not in known:
        raise UnknownNameError("model preset", name, known)
    return from_mapping(ModelConfig, {**known[name], **changes}, where=f"preset {name}")


@functools.cache
def _presets() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in (resources.files("piledriver.models") / "shapes").iterdir():
        if file.name.endswith(".yaml"):
            family = yaml.safe_load(file.read_text(encoding="utf-8"))
            found |= {name: {**family["common"], **size} for name, size in family["sizes"].items()}
    return found
