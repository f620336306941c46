"""Presets: published model shapes by name, as data. One YAML file per family of shapes."""

from piledriver.models.presets.registry import PRESETS, learning_rate, preset, preset_names

__all__ = ["PRESETS", "learning_rate", "preset", "preset_names"]
