"""What a run's folder holds from before, and whether a config goes on with it.

A checkpoint fits any number of processes and any layout, but only the model, the optimizer and the batches that it was
taken of. What differs in those is refused before anything is written: the folder would be two runs in one.
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
from piledriver.models.presets import preset
from piledriver.train.config import TrainConfig

CHECKPOINTS, CONFIG = "checkpoints", "config.yaml"
_MISSING = object()


def shape_of(config: TrainConfig) -> ModelConfig:
    """The model's shape, also where a preset is named."""
    return preset(config.model) if isinstance(config.model, str) else config.model


def last_checkpoint(out: str) -> Path | None:
    """The newest checkpoint of a run. One that was finished and is damaged is an error: nobody asked to begin again."""
    root = Path(out, CHECKPOINTS)
    found = latest(root)
    for folder in sorted(root.glob("step-*"), key=_step_of, reverse=True):
        if found is not None and folder.name == found.name:
            break
        if (folder / HEADER).exists():  # it comes last: a save that was killed has none
            raise damaged(folder, f"{folder} is damaged: its header or a file has another content or length")
    return found


def damaged(folder: Path, what: str) -> CorruptFileError:
    """A checkpoint that cannot be read, and what the user can do about it."""
    others = [other for other in folder.parent.glob("step-*") if _step_of(other) < _step_of(folder)]
    earlier = max((other for other in others if (other / HEADER).exists()), key=_step_of, default=None)
    goes_on = "begins again" if earlier is None else f"goes on from {earlier.name}"
    return CorruptFileError(what, fix=f"restore it from a copy, or remove {folder}: the run {goes_on}")


def check_same_run(config: TrainConfig, checkpoint: Path | None) -> None:
    """Refuse a config that does not go on with the run in its folder; one without a checkpoint takes any."""
    path = os.path.join(config.out, CONFIG)
    if checkpoint is None or not os.path.exists(path):
        return
    try:
        before = load_config(TrainConfig, path)
    except (ConfigError, StorageError) as error:
        raise CorruptFileError(
            f"{path} is not the config of a run: {error.what}", fix="remove it to go on without comparing"
        ) from error
    for name, old, new in _differences(_fixed(before), _fixed(config)):
        raise ConfigError(
            f"{config.out} holds a run with {name}={old}, not {new}", fix=f"set {name}={old} to go on, or another out"
        )
    if config.budget_minutes is not None and config.budget_minutes != before.budget_minutes:
        raise ConfigError(
            f"budget_minutes is {config.budget_minutes:g}, but the steps of {config.out} were laid out when it began",
            fix="say budget_tokens to prolong or shorten the run",
        )


def _fixed(config: TrainConfig) -> dict[str, Any]:
    """What a checkpoint or the count of steps holds: it is not read from the config again."""
    shape = shape_of(config)
    return {
        "model": to_mapping(shape),
        "optimizer": to_mapping(config.optimizer),
        "batch_tokens": config.batch_tokens,
        "data": {"seq_len": config.data.seq_len or shape.max_positions, "packing": config.data.packing},
        "seed": config.seed,
    }


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, old value, new value) of whatever differs, leaf by leaf."""
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name, _MISSING), new.get(name, _MISSING)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, f"{at}{name}.")
        elif before != after:
            yield f"{at}{name}", before, after


def _step_of(folder: Path) -> int:
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdigit() else -1
