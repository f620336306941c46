"""Save a model as a checkpoint folder of `transformers`."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from piledriver.core import storage
from piledriver.core.safetensors import CODES, TensorEntry
from piledriver.models.codes import QuantisedCodes, first_weight
from piledriver.models.config import ModelConfig
from piledriver.models.feed_forward.moe import Experts
from piledriver.models.interchange.compressed_tensors import can_hold, quantisation_settings, write_layer
from piledriver.models.interchange.config_json import TOKEN_IDS, read_config, write_config
from piledriver.models.interchange.families import Family, family_of
from piledriver.models.interchange.folder.files import GENERATION
from piledriver.models.interchange.folder.names import meta_parameters, stays_fp32, tensor_rule
from piledriver.models.interchange.folder.write import write_tensor_files
from piledriver.models.interchange.tensors import OPERATIONS
from piledriver.models.layers import Linear
from piledriver.models.quantised import QuantisedExperts, QuantisedLinear, StackedCodes
from piledriver.models.transformer import Transformer
from piledriver.runtime.dtensor import is_dtensor


def save_folder(
    model: Transformer,
    folder: str | os.PathLike[str],
    *,
    model_type: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    extra: Mapping[str, Any] | None = None,
    weights: Iterable[tuple[str, Tensor | None]] | None = None,
) -> None:
    """Write a folder that `transformers` loads to a model with the same logits, one tensor in memory at a time.

    `extra` is added to config.json; its token ids (`eos_token_id`, ...) replace those of `model.generation`, and go to
    generation_config.json as well. Unknown ids are null, or transformers would fill in its defaults. `weights` yields
    (name, whole parameter) in any order, for a model of which this rank holds a part
    (`engine.shards.full_state_dict.full_tensors`). It is consumed to its end even if writing fails, because other ranks
    take part in gathering each tensor.
    """
    theirs = _config_to_write(model, model_type)
    theirs.pop("quantization_config", None)
    kind = family_of(theirs)
    target = Path(folder)
    quantised = dict(_own_quantised(model))
    stream = iter(_own_weights(model) if weights is None else weights)
    try:
        target.mkdir(parents=True, exist_ok=True)
        dtypes = _dtypes(model, dtype)
        shards = _plan(model.config, kind, dtypes, max_shard_bytes, quantised)
        write_tensor_files(target, shards, _their_tensors(stream, model.config, kind, dtypes))
    finally:
        deque(stream, maxlen=0)
    extra = dict(extra or {})
    generation = {**model.generation, **{key: extra[key] for key in TOKEN_IDS if key in extra}}
    theirs.pop("torch_dtype", None)  # the name before transformers 5
    theirs |= {"dtype": str(next(iter(dtypes.values()))).removeprefix("torch.")}
    theirs |= {key: generation.get(key) for key in TOKEN_IDS} | extra
    if quantised:
        blocks = [cast(QuantisedLinear, layer) for name, layer in quantised.items() if name.startswith("blocks.")]
        vocabulary = _quantised_vocabulary(model, kind)
        theirs["quantization_config"] = quantisation_settings(blocks, vocabulary, _dense_linears(model, kind))
    if model.compression:
        theirs["compression"] = model.compression
    known = {key: value for key, value in generation.items() if value is not None}
    storage.write_text(target / GENERATION, json.dumps(known, indent=2, sort_keys=True) + "\n")
    storage.write_text(target / "config.json", json.dumps(theirs, indent=2, sort_keys=True) + "\n")


def layers_kept_dense(model: Transformer) -> dict[str, str]:
    """Return linear layers and experts of blocks that a folder of the model's family cannot hold quantised, and why."""
    kind = family_of(_config_to_write(model, None))
    found = {}
    for name, module in model.blocks.named_modules():
        parts = {Linear: ("weight",), Experts: ("gate_up", "down")}.get(type(module), ())
        for part in parts:
            operation, names = tensor_rule(kind, f"blocks.{name}.{part}", model.config)
            if not can_hold(getattr(module, part), operation, model.config):
                found[f"blocks.{name}"] = f"{kind.name} stores {names[0]} transposed or stacked"
    return found


def _config_to_write(model: Transformer, model_type: str | None) -> dict[str, Any]:
    """Return the config.json that the model was loaded from if it still describes it, else a new one."""
    source = model.source_config
    if source is not None and model_type in (None, source["model_type"]) and read_config(source) == model.config:
        return dict(source)
    return write_config(model.config, model_type)


def _quantised_vocabulary(model: Transformer, kind: Family) -> dict[str, QuantisedCodes]:
    """Return the embedding and the output projection that are quantised, by their names; tied ones have two."""
    named = {"embedding": model.embedding, "head": model.embedding if model.config.tied else model.head}
    return {
        tensor_rule(kind, f"{name}.weight", model.config)[1][0].removesuffix(".weight"): layer
        for name, layer in named.items()
        if isinstance(layer, QuantisedCodes)
    }


def _dense_linears(model: Transformer, kind: Family) -> list[str]:
    """Return their names of the linear layers that are not quantised."""
    head = tensor_rule(kind, "head.weight", model.config)[1][0].removesuffix(".weight")
    names = [] if isinstance(model.output_layer(), QuantisedCodes) else [head]
    for name, module in model.blocks.named_modules():
        if type(module) is Linear:
            names += [
                source.removesuffix(".weight") for source in tensor_rule(kind, f"blocks.{name}.weight", model.config)[1]
            ]
        if isinstance(module, Experts) and not isinstance(module, QuantisedExperts):
            for part in ("gate_up", "down"):
                sources = tensor_rule(kind, f"blocks.{name}.{part}", model.config)[1]
                names += [source.removesuffix(".weight") for source in sources]
    return names


def _own_quantised(model: Transformer) -> Iterator[tuple[str, QuantisedCodes]]:
    """Yield the quantised layers by the names of the parameters that they replace."""
    for name, module in model.named_modules():
        if isinstance(module, QuantisedCodes):
            yield name.removesuffix("_codes") if isinstance(module, StackedCodes) else f"{name}.weight", module


def _own_weights(model: Transformer) -> Iterator[tuple[str, Tensor | QuantisedCodes]]:
    yield from _own_quantised(model)
    for name, parameter in model.named_parameters():
        yield name, parameter.full_tensor() if is_dtensor(parameter) else parameter


def _dtypes(model: Transformer, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the dtype in which each parameter is written; parameters of other ranks get that of the first one here."""
    here = {name: parameter.dtype for name, parameter in model.named_parameters()}
    usual = dtype or first_weight(model).dtype
    return {
        name: torch.float32 if stays_fp32(name) else dtype or here.get(name, usual)
        for name in meta_parameters(model.config)
    }


def _plan(
    config: ModelConfig,
    kind: Family,
    dtypes: Mapping[str, torch.dtype],
    max_shard_bytes: int,
    quantised: Mapping[str, QuantisedCodes],
) -> list[list[TensorEntry]]:
    """Return the tensors of each file; shapes of dense ones follow from the config, so no weight is needed."""
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for name, parameter in meta_parameters(config).items():
        ours = quantised.get(name, parameter.to(dtypes[name]))
        for their_name, tensor in _made(name, ours, config, kind, dtypes, device="meta"):
            if shards[-1] and size + tensor.nbytes > max_shard_bytes:
                shards.append([])
                size = 0
            code = CODES[str(tensor.dtype).removeprefix("torch.")]
            shards[-1].append(TensorEntry(their_name, code, tuple(tensor.shape), tensor.nbytes))
            size += tensor.nbytes
    return shards


def _their_tensors(
    weights: Iterator[tuple[str, Tensor | QuantisedCodes | None]],
    config: ModelConfig,
    kind: Family,
    dtypes: Mapping[str, torch.dtype],
) -> Iterator[tuple[str, Tensor]]:
    for name, value in weights:
        if name in dtypes and value is not None:
            plain = value.detach().to(device="cpu", dtype=dtypes[name]) if isinstance(value, Tensor) else value
            yield from _made(name, plain, config, kind, dtypes, device="cpu")


def _made(
    name: str,
    value: Tensor | QuantisedCodes,
    config: ModelConfig,
    kind: Family,
    dtypes: Mapping[str, torch.dtype],
    *,
    device: str,
) -> list[tuple[str, Tensor]]:
    """Return their tensors of one of our parameters, those of a quantised layer on a device."""
    operation, names = tensor_rule(kind, name, config)
    if isinstance(value, QuantisedCodes):
        made = write_layer(value, operation, names, config, next(iter(dtypes.values())), device=device)
        if name == "embedding.weight" and config.tied:
            # transformers ties the codes, and wants scales for each of the two layers.
            scales = dict(made)[names[0] + "_scale"]
            made.append((tensor_rule(kind, "head.weight", config)[1][0] + "_scale", scales))
        return made
    return list(zip(names, OPERATIONS[operation].write(value, config), strict=True))
