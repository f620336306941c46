"""Load a checkpoint folder: a new model, or the weights of one that exists, its shard or its stage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from piledriver.core.json_file import read_json
from piledriver.models.config import ModelConfig
from piledriver.models.interchange.config_json import read_config, read_token_ids
from piledriver.models.interchange.errors import InterchangeError
from piledriver.models.interchange.folder.files import AGAIN, GENERATION
from piledriver.models.interchange.folder.names import meta_parameters, stays_fp32
from piledriver.models.interchange.folder.quantised import quantised_layers
from piledriver.models.interchange.folder.weights import read_weights
from piledriver.models.quantised import StackedCodes, replace_experts, replace_linear
from piledriver.models.transformer import Transformer
from piledriver.runtime.dtensor import is_dtensor


def load_folder(
    folder: str | os.PathLike[str], *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Transformer:
    """Return a model with the weights of a checkpoint folder, in `dtype` (default: that of its embedding).

    Token ids and generation settings of the folder are kept in `model.generation`, its config.json in
    `model.source_config`; `save_folder` writes both. Quantised layers stay quantised where our kernels take them, and
    become dense otherwise.
    """
    config, theirs = read_folder_config(folder)
    with torch.device("meta"):
        model = Transformer(config)
    quantised = quantised_layers(folder, config, theirs) if theirs.get("quantization_config") else {}
    dense = {name for name in meta_parameters(config) if name not in quantised}
    weights = read_weights(folder, config, theirs, dense)
    first_name, first = next(weights)
    model.to(dtype or first.dtype).to_empty(device=device)
    targets = dict(model.named_parameters())
    for name, parameter in targets.items():
        if stays_fp32(name):
            parameter.data = parameter.data.float()
    _copy(targets[first_name], first)
    for name, tensor in weights:
        _copy(targets[name], tensor)
    for name, layer in quantised.items():
        if not isinstance(layer, StackedCodes):
            replace_linear(model, name.removesuffix(".weight"), layer.to(device))
        elif name.endswith(".gate_up"):
            experts = name.removesuffix(".gate_up")
            down = cast(StackedCodes, quantised[f"{experts}.down"])
            replace_experts(model, experts, layer.to(device), down.to(device))
    model.compression = list(theirs.get("compression") or [])
    model.source_config, model.generation = theirs, read_generation(folder, theirs)
    return model


def load_weights(model: Transformer, folder: str | os.PathLike[str]) -> None:
    """Load weights into an existing model, a shard or a pipeline stage of one, one tensor at a time.

    The configs must be equal.
    """
    config, theirs = read_folder_config(folder)
    if config != model.config:
        raise InterchangeError(
            f"the config of {os.fspath(folder)} is of another shape than the model's",
            fix="build the model from that config",
        )
    targets = dict(model.named_parameters())
    for name, tensor in read_weights(folder, config, theirs, targets):
        _copy(targets[name], tensor)


def read_folder_config(folder: str | os.PathLike[str]) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the `ModelConfig` of a checkpoint folder, and the content of its config.json."""
    theirs = read_json(Path(folder) / "config.json", again=AGAIN)
    return read_config(theirs), theirs


def read_generation(folder: str | os.PathLike[str], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token ids and generation settings of a checkpoint folder whose config.json holds `theirs`."""
    settings = Path(folder) / GENERATION
    return {**read_token_ids(theirs), **(read_json(settings, again=AGAIN) if settings.exists() else {})}


def stored_dtype(folder: str | os.PathLike[str]) -> torch.dtype:
    """Return the dtype of a folder's embedding, in which its weights are loaded."""
    config, theirs = read_folder_config(folder)
    return next(read_weights(folder, config, theirs))[1].dtype


@torch.no_grad()
def _copy(target: Tensor, source: Tensor) -> None:
    if is_dtensor(target):
        from torch.distributed.tensor import distribute_tensor

        moved = source.to(device=target.device, dtype=target.dtype).contiguous()
        target.copy_(distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None))
    else:
        target.copy_(source)
