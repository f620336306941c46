"""Which tensors of a checkpoint folder make which of our parameters."""

from __future__ import annotations

import os
import re

import torch
from torch import Tensor

from piledriver.models.config import ModelConfig
from piledriver.models.interchange.errors import InterchangeError
from piledriver.models.interchange.families import Family
from piledriver.models.interchange.quantised_layers import StoredTensors
from piledriver.models.transformer import Transformer


def tensor_rule(kind: Family, name: str, config: ModelConfig) -> tuple[str, list[str]]:
    """Return the operation of one of our parameters, and their tensors in the order that it takes."""
    layer = next(iter(re.findall(r"^blocks\.(\d+)\.", name)), "")
    pattern = re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name)
    if pattern not in kind.weights:
        raise InterchangeError(f"family {kind.name} has no tensor for {name}", fix="choose another model_type")
    operation, *sources = kind.weights[pattern]
    counts = {"{e}": config.moe.experts if config.moe else 0, "{h}": config.heads, "{k}": config.kv_heads}
    expanded = []
    for source in sources:
        number = next((mark for mark in counts if mark in source), None)
        indices = range(counts[number]) if number is not None else [0]
        expanded += [source.replace("{i}", layer).replace(number or "{}", str(index)) for index in indices]
    return operation, expanded


def stored_name(tensors: StoredTensors, kind: Family, source: str, folder: str | os.PathLike[str]) -> str:
    """Return the name of a tensor in a folder: some are saved without the prefix of the family."""
    for name in (source, source.removeprefix(kind.prefix)):
        if tensors.parts(name):
            return name
    raise InterchangeError(f"{os.fspath(folder)} has no tensor {source}", fix="check its config.json")


def meta_parameters(config: ModelConfig) -> dict[str, Tensor]:
    """Return every parameter of a model of this config, on the meta device."""
    with torch.device("meta"):
        return {name: parameter.detach() for name, parameter in Transformer(config).named_parameters()}


def stays_fp32(name: str) -> bool:
    """Return whether a parameter is fp32 in checkpoints of any dtype: routers compare sums with it."""
    return name.endswith("router.correction_bias")
