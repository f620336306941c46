"""`config_of`: the `ModelConfig` of whatever names a model. It imports nothing of the planner."""

from __future__ import annotations

import os
from typing import Any

from piledriver.core.errors import MissingFileError
from piledriver.models.config import ModelConfig
from piledriver.models.presets import preset
from piledriver.plan.errors import PlanError


def config_of(model: Any) -> tuple[ModelConfig, str]:
    """Return the config and the name of a model: a config, a preset, a folder with a config.json, a `Transformer`."""
    if isinstance(model, ModelConfig):
        return model, "model"
    if isinstance(model, str | os.PathLike):
        folder = os.path.dirname(os.path.abspath(model)) if os.path.basename(model) == "config.json" else model
        if os.path.isdir(folder):
            from piledriver.models.interchange import read_folder_config

            return read_folder_config(folder)[0], os.path.basename(os.path.abspath(folder))
        if os.path.isfile(model):
            raise PlanError(
                f"{os.fspath(model)} is neither a training config nor a model",
                fix="name a .yaml file, a folder with a config.json, or a preset (piledriver presets)",
            )
        if os.path.sep in os.fspath(model):
            raise MissingFileError(
                os.fspath(model), fix="name a folder with a config.json, or a preset (piledriver presets)"
            )
        return preset(os.fspath(model)), os.fspath(model)
    found = getattr(model, "config", None)
    if isinstance(found, ModelConfig):
        return found, type(model).__name__
    if found is not None and hasattr(found, "to_dict"):
        from piledriver.models.interchange.config_json import read_config

        return read_config(found.to_dict()), type(model).__name__
    raise PlanError(
        f"cannot read the shape of a {type(model).__name__}",
        fix="give a ModelConfig, a preset or a model folder; trace_module counts any nn.Module with an example input",
    )
