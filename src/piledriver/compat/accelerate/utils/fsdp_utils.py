"""`accelerate.utils.fsdp_utils`: sharded models and optimizers in piledriver's checkpoint format.

The folders have the names that transformers' Trainer looks for. A checkpoint loads on any number of ranks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from piledriver.accelerator.saving.files import save_object
from piledriver.checkpoint import Contents, load, load_model, save
from piledriver.compat.accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a model: full weights in one file, or every rank's shards in a folder, as `state_dict_type` says.

    Frozen weights are included also with `adapter_only`.
    """
    suffix = f"_{model_index}" if model_index else ""
    if "FULL_STATE_DICT" in str(fsdp_plugin.state_dict_type):
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            save_object(state, Path(output_dir) / f"{FSDP_MODEL_NAME}{suffix}.bin")
        accelerator.wait_for_everyone()
        return
    save(Path(output_dir) / f"{FSDP_MODEL_NAME}_{model_index}", Contents(models=[model], rng=False))


def load_fsdp_model(
    fsdp_plugin: Any, accelerator: Any, model: nn.Module, input_dir: Any, model_index: int = 0, **_: Any
) -> Any:
    """Load what `save_fsdp_model` saved, or torch's own DCP folder; return missing and unexpected keys."""
    folder = Path(input_dir) / f"{FSDP_MODEL_NAME}_{model_index}"
    suffix = f"_{model_index}" if model_index else ""
    source = folder if folder.is_dir() else Path(input_dir) / f"{FSDP_MODEL_NAME}{suffix}.bin"
    report = load_model(model, source, strict=False)
    return nn.modules.module._IncompatibleKeys(list(report.missing), list(report.unexpected))


def save_fsdp_optimizer(
    fsdp_plugin: Any, accelerator: Any, optimizer: Any, model: nn.Module, output_dir: Any, optimizer_index: int = 0
) -> None:
    """Save the shards of an optimizer's state in a folder."""
    folder = Path(output_dir) / f"{OPTIMIZER_NAME}_{optimizer_index}"
    save(folder, Contents(optimizers=[optimizer], rng=False))


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: Any,
    optimizer_index: int = 0,
    **_: Any,
) -> None:
    """Load what `save_fsdp_optimizer` saved."""
    load(Path(input_dir) / f"{OPTIMIZER_NAME}_{optimizer_index}", Contents(optimizers=[optimizer], rng=False))


def get_parameters_from_modules(modules: Any, model: nn.Module, device: Any) -> set[torch.nn.Parameter]:
    """Return the parameters of modules, which a regular expression over module names may choose."""
    if isinstance(modules, str):
        modules = [module.to(device) for name, module in model.named_modules() if re.fullmatch(modules, name)]
    return {parameter for module in modules or () for parameter in module.parameters()}
