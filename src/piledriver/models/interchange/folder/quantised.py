"""Layers of a checkpoint folder that stay quantised when it is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piledriver.models.codes import QuantisedCodes
from piledriver.models.config import ModelConfig
from piledriver.models.interchange.compressed_tensors import flat_codes, merge_codes
from piledriver.models.interchange.errors import InterchangeError
from piledriver.models.interchange.families import family_of
from piledriver.models.interchange.folder.files import open_tensors, tensor_files
from piledriver.models.interchange.folder.names import meta_parameters, stored_name, tensor_rule
from piledriver.models.interchange.quantised_layers import Codes, StoredTensors
from piledriver.models.layers import Linear
from piledriver.models.quantised import DynamicQuantisedLinear, QuantisedEmbedding, QuantisedLinear, StackedCodes
from piledriver.models.transformer import Transformer


def quantised_layers(
    folder: str | os.PathLike[str], config: ModelConfig, theirs: Mapping[str, Any]
) -> dict[str, QuantisedCodes]:
    """Return the layers whose weights our kernels take quantised, by the names of their weights."""
    layers = dict(read_quantised_layers(folder, config, theirs))
    whole = without_lone_matrices({name for name, layer in layers.items() if isinstance(layer, StackedCodes)})
    return {name: layer for name, layer in layers.items() if not isinstance(layer, StackedCodes) or name in whole}


def read_quantised_layers(
    folder: str | os.PathLike[str], config: ModelConfig, theirs: Mapping[str, Any]
) -> Iterator[tuple[str, QuantisedCodes]]:
    """Yield the layers of `quantised_layers` one by one, and with them matrices of experts whose other one is dense."""
    kind, files = family_of(theirs), tensor_files(Path(folder))
    with ExitStack() as stack:
        handles = {path: stack.enter_context(open_tensors(path)) for path in sorted(set(files.values()))}
        tensors = StoredTensors(theirs, set(files), lambda stored: handles[files[stored]].get_tensor(stored))
        shapes = meta_parameters(config)
        for name in _candidates(config, shapes):
            shape = shapes[name]
            operation, sources = tensor_rule(kind, name, config)
            stored = [stored_name(tensors, kind, source, folder) for source in sources]
            dynamic = {tensors.is_dynamic(name) for name in stored}
            parts = [tensors.codes(name) for name in stored] if len(dynamic) == 1 else [None]
            codes = merge_codes([part for part in parts if part is not None], operation, config) if all(parts) else None
            if codes is None:
                continue
            if codes.values.shape != shape.shape:
                raise InterchangeError(
                    f"{os.fspath(folder)}: {name} is {tuple(codes.values.shape)}, but config.json implies "
                    f"{tuple(shape.shape)}",
                    fix="check the config.json of the folder",
                )
            layer = _layer(name, codes, dynamic=dynamic.pop())
            if layer is not None:
                yield name, layer


def _layer(name: str, codes: Codes, *, dynamic: bool) -> QuantisedCodes | None:
    """Return the layer of a parameter with these codes; None if it is read dense."""
    if codes.values.dim() == 3:
        return None if dynamic else StackedCodes(flat_codes(codes), len(codes.values))
    packed = codes.grid.pack(codes.values)
    if name == "embedding.weight":
        return QuantisedEmbedding(packed) if packed.kind != "int4" and packed.scales.shape[1] == 1 else None
    if name == "head.weight":
        return QuantisedLinear(packed)
    return DynamicQuantisedLinear(packed) if dynamic else QuantisedLinear(packed)


def _candidates(config: ModelConfig, shapes: Mapping[str, Tensor]) -> list[str]:
    """Return the parameters that may be quantised: linear layers, experts, embedding, output projection."""
    with torch.device("meta"):
        blocks = Transformer(config).blocks
    linears = {f"blocks.{name}.weight" for name, module in blocks.named_modules() if type(module) is Linear}
    linears.add("embedding.weight")
    if not config.head_bias:
        linears.add("head.weight")
    return [name for name, shape in shapes.items() if name in linears or shape.dim() == 3]


def without_lone_matrices(experts: set[str]) -> set[str]:
    """Leave out a quantised matrix of experts whose other matrix is dense: it is read dense too.

    >>> sorted(without_lone_matrices({"0.gate_up", "0.down", "1.down"}))
    ['0.down', '0.gate_up']
    """
    other = {"gate_up": "down", "down": "gate_up"}
    split = {name: name.rpartition(".") for name in experts}
    return {name for name, (parent, _, part) in split.items() if f"{parent}.{other[part]}" in experts}
