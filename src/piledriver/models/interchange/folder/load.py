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
from piledriver.models.interchange.folder.names import stays_fp32
from piledriver.models.interchange.folder.quantised import quantised_layers
from piledriver.models.interchange.folder.weights import read_parts, read_weights
from piledriver.models.quantised import StackedCodes, replace_experts, replace_layer
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
    model = allocate_folder(folder, device=device, dtype=dtype)
    config, theirs = model.config, cast(dict[str, Any], model.source_config)
    quantised = quantised_layers(folder, config, theirs) if theirs.get("quantization_config") else {}
    targets = {name: parameter for name, parameter in model.named_parameters() if name not in quantised}
    _read(targets, folder, config, theirs)
    for name, layer in quantised.items():
        if not isinstance(layer, StackedCodes):
            replace_layer(model, name.removesuffix(".weight"), layer.to(device=device, dtype=dtype))
        elif name.endswith(".gate_up"):
            experts = name.removesuffix(".gate_up")
            down = cast(StackedCodes, quantised[f"{experts}.down"])
            replace_experts(model, experts, layer.to(device), down.to(device))
    return model


def allocate_folder(
    folder: str | os.PathLike[str], *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Transformer:
    """Return the model of a checkpoint folder with memory for its weights, which `load_weights` reads.

    What needs shapes and no values can be prepared in between. Layers of a quantised folder are dense.
    """
    config, theirs = read_folder_config(folder)
    with torch.device("meta"):
        model = Transformer(config)
    wanted = dtype or stored_dtype(folder)

    def allocate(meta: Tensor) -> Tensor:
        # Not by an operation on the meta device, which would import torch's whole compiler.
        dtype = wanted if meta.is_floating_point() else meta.dtype
        return torch.empty_strided(meta.shape, meta.stride(), dtype=dtype, device=device)

    model._apply(allocate)  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if stays_fp32(name):
            parameter.data = parameter.data.float()
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
    _read(dict(model.named_parameters()), folder, config, theirs)


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
def _read(
    targets: Mapping[str, Tensor], folder: str | os.PathLike[str], config: ModelConfig, theirs: Mapping[str, Any]
) -> None:
    """Copy the weights of a folder to parameters; those of one device are put together there."""
    places = {target.device for target in targets.values()}
    whole = len(places) == 1 and not any(is_dtensor(target) for target in targets.values())
    device = places.pop() if whole else None
    for name, operation, parts in read_parts(folder, config, theirs, targets, device=device):
        if is_dtensor(targets[name]):
            _distribute(targets[name], operation.read(parts, config))
        else:
            operation.read_into(targets[name], parts, config)


def _distribute(target: Any, source: Tensor) -> None:
    from torch.distributed.tensor import distribute_tensor

    moved = source.to(device=target.device, dtype=target.dtype).contiguous()
    target.copy_(distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None))
