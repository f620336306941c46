"""`accelerate.checkpointing`: the functions beneath `save_state`, as calls of `piledriver.checkpoint`."""

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
    """Save optimizers, schedulers, loaders and scaler; return the folder. Models are saved by `save_model`."""
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
    """Load a checkpoint of ours or of Accelerate's; return its step."""
    contents = Contents(models=models, optimizers=optimizers, schedulers=schedulers, loaders=dataloaders, scaler=scaler)
    report = load(input_dir, contents)
    return {"step": report.step or 0}


def save_custom_state(obj: Any, path: str, index: int = 0, save_on_each_node: bool = False) -> None:
    """Save the state dict of one object to a file."""
    torch.save(obj.state_dict(), Path(path) / f"custom_checkpoint_{index}.pkl")


def load_custom_state(obj: Any, path: str, index: int = 0) -> None:
    """Load the state dict of one object, without executing pickled code."""
    obj.load_state_dict(
        torch.load(Path(path) / f"custom_checkpoint_{index}.pkl", map_location="cpu", weights_only=True)
    )
