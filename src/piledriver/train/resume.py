"""Resuming: find the last checkpoint of a run folder and check that a config continues the same run.

A checkpoint fits any number of processes and any layout, but only the model, optimizer and batches of its run. A config
that differs in those is rejected before anything is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from piledriver.checkpoint import latest
from piledriver.checkpoint.header import HEADER
from piledriver.core.config import load_config, to_mapping
from piledriver.core.errors import ConfigError, CorruptFileError, StorageError
from piledriver.models.config import ModelConfig
from piledriver.models.interchange import read_folder_config
from piledriver.models.presets import preset
from piledriver.train.config import TrainConfig
from piledriver.train.pretrained import check_folder

CHECKPOINTS, CONFIG = "checkpoints", "config.yaml"
_MISSING = object()


def shape_of(config: TrainConfig) -> ModelConfig:
    """Return the model's config: of a preset by name, of a Hugging Face folder, or as given."""
    if config.model_folder is not None:
        check_folder(config.model_folder)
        return read_folder_config(config.model_folder)[0]
    return preset(config.model) if isinstance(config.model, str) else config.model


def last_checkpoint(out: str) -> Path | None:
    """Return the newest checkpoint of a run, if any; raise `CorruptFileError` if a complete one is damaged."""
    root = Path(out, CHECKPOINTS)
    found = latest(root)
    for folder in sorted(root.glob("step-*"), key=_step_of, reverse=True):
        if found is not None and folder.name == found.name:
            break
        if (folder / HEADER).exists():  # written last: an interrupted save has no header
            raise damaged(folder, f"{folder} is damaged: the checksum or length of its header or of a file differs")
    return found


def damaged(folder: Path, what: str) -> CorruptFileError:
    """Return the error for an unreadable checkpoint; its fix names the one that the run would resume from instead."""
    others = [other for other in folder.parent.glob("step-*") if _step_of(other) < _step_of(folder)]
    earlier = max((other for other in others if (other / HEADER).exists()), key=_step_of, default=None)
    instead = "restarts at step 0" if earlier is None else f"resumes from {earlier.name}"
    return CorruptFileError(what, fix=f"restore it from a copy, or remove {folder}: the run then {instead}")


def saved_config(out: str, checkpoint: Path | None) -> TrainConfig | None:
    """Return the config of the run that has this checkpoint; None where there is nothing to resume."""
    path = os.path.join(out, CONFIG)
    if checkpoint is None or not os.path.exists(path):
        return None
    try:
        return load_config(TrainConfig, path)
    except (ConfigError, StorageError) as error:
        raise CorruptFileError(
            f"{path} is not the config of a run: {error.what}", fix="remove it to resume without this check"
        ) from error


def check_same_run(config: TrainConfig, before: TrainConfig | None) -> None:
    """Raise `ConfigError` if the run to resume has another model, optimizer or batches."""
    if before is None:
        return
    for name, old, new in _differences(_fixed(before), _fixed(config)):
        raise ConfigError(
            f"{config.out} holds a run with {name}={old}, not {new}",
            fix=f"set {name}={old} to resume it, or use another out",
        )
    if config.budget_minutes is not None and config.budget_minutes != before.budget_minutes:
        raise ConfigError(
            f"budget_minutes is {config.budget_minutes:g}, but the steps of {config.out} were fixed at its first start",
            fix="set budget_tokens to extend or shorten the run",
        )


def _fixed(config: TrainConfig) -> dict[str, Any]:
    """Return the values that must not change between starts: checkpoints and the step count depend on them."""
    shape = shape_of(config)
    return {
        "model": to_mapping(shape),
        "optimizer": to_mapping(config.optimizer),
        "batch_tokens": config.batch_tokens,
        "data": {"seq_len": config.data.seq_len or shape.max_positions, "packing": config.data.packing},
        "seed": config.seed,
        "keep_zeros": config.keep_zeros,
    }


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted name, old value, new value) of each leaf that differs."""
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, _MISSING), new.get(name, _MISSING)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, f"{at}{name}.")
        elif before != after:
            yield f"{at}{name}", before, after


def _step_of(folder: Path) -> int:
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdigit() else -1
