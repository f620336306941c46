"""Presets by name. Other packages add theirs through the entry-point group `piledriver.model_preset`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from piledriver.core.config import from_mapping, load_yaml
from piledriver.core.registry import Registry
from piledriver.models.config import ModelConfig
from piledriver.models.model_size import parameter_count

_LEARNING_RATE = "learning_rate"


def _read_table() -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for file in resources.files("piledriver.models.presets").iterdir():
        if file.name.endswith(".yaml"):
            shapes = load_yaml(file.read_text(encoding="utf-8"))
            found |= {name: {**shapes["common"], **size} for name, size in shapes["sizes"].items()}
    return found


PRESETS: Registry[Mapping[str, Any]] = Registry("model_preset", read_table=_read_table)
"""The fields of a `ModelConfig` by preset, and the published peak `learning_rate` if known.

A file has what its shapes share (`common`) and what differs (`sizes`).
"""


def preset_names() -> list[str]:
    """Return the name of every preset, sorted."""
    return list(PRESETS)


def preset(name: str, **changes: Any) -> ModelConfig:
    """Return the config of a preset, with some fields changed.

    >>> preset("gpt2").layers, preset("gpt2", layers=2).layers
    (12, 2)
    """
    fields = {key: value for key, value in PRESETS[name].items() if key != _LEARNING_RATE}
    return from_mapping(ModelConfig, {**fields, **changes}, where=f"preset {name}")


def learning_rate(model: str | ModelConfig) -> float:
    """Return the peak learning rate of AdamW for a preset or a shape: the published one, or one by size.

    Without a published rate it falls with the cube root of the parameters, from 3e-3 at a million: within a third of
    those that GPT-3 used from 125M to 13B (Brown et al., 2020, table 2.1).

    >>> learning_rate("tiny"), learning_rate("gpt2-124m"), learning_rate("llama-3-8b")
    (0.0027, 0.0006, 0.0003)
    """
    if isinstance(model, str) and _LEARNING_RATE in PRESETS[model]:
        return float(PRESETS[model][_LEARNING_RATE])
    shape = preset(model) if isinstance(model, str) else model
    return float(f"{3e-3 * (parameter_count(shape) / 1e6) ** (-1 / 3):.1e}")
