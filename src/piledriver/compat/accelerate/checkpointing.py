"""Accelerate's functions under `save_state`; ours is one call on `piledriver.checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from piledriver.checkpoint import Contents, load, save


def save_accelerator_state(
    output_dir: str,
    model_states: list[Any],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> str:
    """Everything but the models, which are given as state dicts and belong to `save_model`."""
    contents = Contents(optimizers=optimizers, schedulers=schedulers, loaders=dataloaders, scaler=scaler)
    return str(save(output_dir, contents, step=step))


def load_accelerator_state(
    input_dir: str,
    models: list[Any],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    scaler: Any = None,
    map_location: Any = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load a folder of ours or of Accelerate's."""
    contents = Contents(models=models, optimizers=optimizers, schedulers=schedulers, loaders=dataloaders, scaler=scaler)
    report = load(input_dir, contents)
    return {"step": report.step or 0}


def save_custom_state(obj: Any, path: str, index: int = 0, save_on_each_node: bool = False) -> None:
    """One object's state, in a file of its own."""
    torch.save(obj.state_dict(), Path(path) / f"custom_checkpoint_{index}.pkl")


def load_custom_state(obj: Any, path: str, index: int = 0) -> None:
    """The same back; nothing in the file is executed."""
    obj.load_state_dict(
        torch.load(Path(path) / f"custom_checkpoint_{index}.pkl", map_location="cpu", weights_only=True)
    )
