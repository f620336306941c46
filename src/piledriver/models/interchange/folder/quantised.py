"""Layers of a checkpoint folder that stay quantised when it is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from piledriver.models.config import ModelConfig
from piledriver.models.interchange.compressed_tensors import flat_codes, merge_codes
from piledriver.models.interchange.errors import InterchangeError
from piledriver.models.interchange.families import family_of
from piledriver.models.interchange.folder.files import open_tensors, tensor_files
from piledriver.models.interchange.folder.names import meta_parameters, stored_name, tensor_rule
from piledriver.models.interchange.quantised_layers import StoredTensors
from piledriver.models.layers import Linear
from piledriver.models.quantised import DynamicQuantisedLinear, QuantisedLinear, StackedCodes
from piledriver.models.transformer import Transformer


def quantised_layers(
    folder: str | os.PathLike[str], config: ModelConfig, theirs: Mapping[str, Any]
) -> dict[str, QuantisedLinear]:
    """Return the layers of blocks whose weights our kernels take quantised, by the names of their weights."""
    layers = dict(read_quantised_layers(folder, config, theirs))
    whole = without_lone_matrices({name for name, layer in layers.items() if isinstance(layer, StackedCodes)})
    return {name: layer for name, layer in layers.items() if not isinstance(layer, StackedCodes) or name in whole}


def read_quantised_layers(
    folder: str | os.PathLike[str], config: ModelConfig, theirs: Mapping[str, Any]
) -> Iterator[tuple[str, QuantisedLinear]]:
    """Yield the layers of `quantised_layers` one by one, and with them matrices of experts whose other one is dense."""
    kind, files = family_of(theirs), tensor_files(Path(folder))
    with ExitStack() as stack:
        handles = {path: stack.enter_context(open_tensors(path)) for path in sorted(set(files.values()))}
        tensors = StoredTensors(theirs, set(files), lambda stored: handles[files[stored]].get_tensor(stored))
        made = DynamicQuantisedLinear if tensors.dynamic else QuantisedLinear
        with torch.device("meta"):
            linears = {name for name, module in Transformer(config).blocks.named_modules() if type(module) is Linear}
        for name, shape in meta_parameters(config).items():
            stacked = shape.dim() == 3 and not tensors.dynamic
            if name.removeprefix("blocks.").removesuffix(".weight") not in linears and not stacked:
                continue
            operation, sources = tensor_rule(kind, name, config)
            parts = [tensors.codes(stored_name(tensors, kind, source, folder)) for source in sources]
            codes = merge_codes([part for part in parts if part is not None], operation, config) if all(parts) else None
            if codes is None:
                continue
            if codes.values.shape != shape.shape:
                raise InterchangeError(
                    f"{os.fspath(folder)}: {name} is {tuple(codes.values.shape)}, but config.json implies "
                    f"{tuple(shape.shape)}",
                    fix="check the config.json of the folder",
                )
            if stacked:
                yield name, StackedCodes(flat_codes(codes), len(shape))
            else:
                yield name, made(codes.grid.pack(codes.values))


def without_lone_matrices(experts: set[str]) -> set[str]:
    """Leave out a quantised matrix of experts whose other matrix is dense: it is read dense too.

    >>> sorted(without_lone_matrices({"0.gate_up", "0.down", "1.down"}))
    ['0.down', '0.gate_up']
    """
    other = {"gate_up": "down", "down": "gate_up"}
    split = {name: name.rpartition(".") for name in experts}
    return {name for name, (parent, _, part) in split.items() if f"{parent}.{other[part]}" in experts}
