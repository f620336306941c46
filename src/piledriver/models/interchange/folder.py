"""Checkpoint folders of `transformers`: config.json and safetensors, one file or sharded. Pickle is never read."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, StorageError
from piledriver.core.safetensors import CODES, SafetensorsWriter, TensorEntry
from piledriver.models.config import ModelConfig
from piledriver.models.feed_forward.moe import Experts
from piledriver.models.interchange.compressed_tensors import flat_codes, merge_codes, quantisation_settings, write_layer
from piledriver.models.interchange.config_json import TOKEN_IDS, read_config, read_token_ids, write_config
from piledriver.models.interchange.errors import InterchangeError
from piledriver.models.interchange.families import Family, family_of
from piledriver.models.interchange.quantised_layers import StoredTensors
from piledriver.models.interchange.tensors import OPERATIONS
from piledriver.models.layers import Linear
from piledriver.models.quantised import (
    DynamicQuantisedLinear,
    QuantisedExperts,
    QuantisedLinear,
    StackedCodes,
    replace_experts,
    replace_linear,
)
from piledriver.models.transformer import Transformer

_WHOLE, _INDEX, _GENERATION = "model.safetensors", "model.safetensors.index.json", "generation_config.json"
_MODEL_FILES = (".json", ".txt", ".model", ".tiktoken", ".jinja")


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
    quantised = _quantised_layers(folder, config, theirs) if theirs.get("quantization_config") else {}
    dense = {name for name in _meta_parameters(config) if name not in quantised}
    weights = read_weights(folder, config, theirs, dense)
    first_name, first = next(weights)
    model.to(dtype or first.dtype).to_empty(device=device)
    targets = dict(model.named_parameters())
    for name, parameter in targets.items():
        if _stays_fp32(name):
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


def read_generation(folder: str | os.PathLike[str], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token ids and generation settings of a checkpoint folder whose config.json holds `theirs`."""
    settings = Path(folder) / _GENERATION
    return {**read_token_ids(theirs), **(_read_json(settings) if settings.exists() else {})}


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
    theirs = _read_json(Path(folder) / "config.json")
    return read_config(theirs), theirs


def stored_dtype(folder: str | os.PathLike[str]) -> torch.dtype:
    """Return the dtype of a folder's embedding, in which its weights are loaded."""
    config, theirs = read_folder_config(folder)
    return next(read_weights(folder, config, theirs))[1].dtype


def read_weights(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    theirs: Mapping[str, Any],
    names: Container[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor) of every parameter, or of `names` only; `theirs` is the content of its config.json.

    Missing or unknown tensors raise `InterchangeError`.
    """
    kind, files = family_of(theirs), _tensor_files(Path(folder))
    unread = set(files)
    with ExitStack() as stack:
        handles = {path: stack.enter_context(_open(path)) for path in sorted(set(files.values()))}
        tensors = StoredTensors(theirs, set(files), lambda stored: handles[files[stored]].get_tensor(stored))
        shapes = _meta_parameters(config)
        for name in shapes:
            operation, sources = _rule(kind, name, config)
            parts = []
            for source in sources:
                found = _stored_name(tensors, kind, source, folder)
                unread.difference_update(tensors.parts(found))
                if names is None or name in names:
                    parts.append(tensors.dense(found))
            if parts:
                _check_shapes(folder, sources, parts, OPERATIONS[operation].write(shapes[name], config))
                yield name, OPERATIONS[operation].read(parts, config)
    allowed = [pattern.replace("{layers}", str(config.layers)) for pattern in kind.ignore]
    allowed += [re.escape(kind.weights["head.weight"][1])] if config.tied else []
    left = sorted(key for key in unread if not any(re.search(pattern, key) for pattern in allowed))
    if left:
        raise InterchangeError(
            f"{os.fspath(folder)} holds {len(left)} tensors that are not in a {kind.name} model of its config, "
            f"first {left[0]}",
            fix="check its config.json",
        )


def stored_parts(
    folder: str | os.PathLike[str], config: ModelConfig, theirs: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[list[Tensor]], Tensor] | None, list[tuple[str, str]]]]:
    """Yield (our name, conversion, [(file, their name)]) of every parameter: where its weight is, without reading it.

    The conversion makes our tensor of theirs; None where they are the same. A quantised folder has no such parts.
    """
    if theirs.get("quantization_config"):
        raise InterchangeError(
            f"{os.fspath(folder)} is quantised: its weights have no single place in the files",
            fix="load it whole with load_folder",
        )
    kind, files = family_of(theirs), _tensor_files(Path(folder))
    tensors = StoredTensors(theirs, set(files), lambda stored: torch.empty(0))
    for name in _meta_parameters(config):
        operation, sources = _rule(kind, name, config)
        found = [_stored_name(tensors, kind, source, folder) for source in sources]
        make = None if operation == "copy" else partial(_read_parts, operation, config)
        yield name, make, [(files[stored], stored) for stored in found]


def _read_parts(operation: str, config: ModelConfig, parts: list[Tensor]) -> Tensor:
    return OPERATIONS[operation].read(parts, config)


def _stored_name(tensors: StoredTensors, kind: Family, source: str, folder: str | os.PathLike[str]) -> str:
    """Return the name of a tensor in a folder: some are saved without the prefix of the family."""
    for name in (source, source.removeprefix(kind.prefix)):
        if tensors.parts(name):
            return name
    raise InterchangeError(f"{os.fspath(folder)} has no tensor {source}", fix="check its config.json")


def _quantised_layers(
    folder: str | os.PathLike[str], config: ModelConfig, theirs: Mapping[str, Any]
) -> dict[str, QuantisedLinear]:
    """Return the layers of blocks whose weights our kernels take quantised, by the names of their weights."""
    kind, files = family_of(theirs), _tensor_files(Path(folder))
    layers: dict[str, QuantisedLinear] = {}
    with ExitStack() as stack:
        handles = {path: stack.enter_context(_open(path)) for path in sorted(set(files.values()))}
        tensors = StoredTensors(theirs, set(files), lambda stored: handles[files[stored]].get_tensor(stored))
        made = DynamicQuantisedLinear if tensors.dynamic else QuantisedLinear
        with torch.device("meta"):
            linears = {name for name, module in Transformer(config).blocks.named_modules() if type(module) is Linear}
        for name, shape in _meta_parameters(config).items():
            stacked = shape.dim() == 3 and not tensors.dynamic
            if name.removeprefix("blocks.").removesuffix(".weight") not in linears and not stacked:
                continue
            operation, sources = _rule(kind, name, config)
            parts = [tensors.codes(_stored_name(tensors, kind, source, folder)) for source in sources]
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
                layers[name] = StackedCodes(flat_codes(codes), len(shape))
            else:
                layers[name] = made(codes.grid.pack(codes.values))
    return _without_lone_matrices(layers)


def _without_lone_matrices(layers: dict[str, QuantisedLinear]) -> dict[str, QuantisedLinear]:
    """Leave out a quantised matrix of experts whose other matrix is dense: it is read dense too."""
    other = {"gate_up": "down", "down": "gate_up"}
    kept = {}
    for name, layer in layers.items():
        parent, _, part = name.rpartition(".")
        if not isinstance(layer, StackedCodes) or f"{parent}.{other[part]}" in layers:
            kept[name] = layer
    return kept


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
        _write_shards(target, shards, _their_tensors(stream, model.config, kind, dtypes))
    finally:
        deque(stream, maxlen=0)
    extra = dict(extra or {})
    generation = {**model.generation, **{key: extra[key] for key in TOKEN_IDS if key in extra}}
    theirs.pop("torch_dtype", None)  # the name before transformers 5
    theirs |= {"dtype": str(next(iter(dtypes.values()))).removeprefix("torch.")}
    theirs |= {key: generation.get(key) for key in TOKEN_IDS} | extra
    if quantised:
        theirs["quantization_config"] = quantisation_settings(quantised.values(), _dense_linears(model, kind))
    if model.compression:
        theirs["compression"] = model.compression
    known = {key: value for key, value in generation.items() if value is not None}
    storage.write_text(target / _GENERATION, json.dumps(known, indent=2, sort_keys=True) + "\n")
    storage.write_text(target / "config.json", json.dumps(theirs, indent=2, sort_keys=True) + "\n")


def _config_to_write(model: Transformer, model_type: str | None) -> dict[str, Any]:
    """Return the config.json that the model was loaded from if it still describes it, else a new one."""
    source = model.source_config
    if source is not None and model_type in (None, source["model_type"]) and read_config(source) == model.config:
        return dict(source)
    return write_config(model.config, model_type)


def copy_model_files(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[Path]:
    """Copy config, generation settings and tokenizer of a checkpoint folder, without its weights; return the copies."""
    copies = []
    for path in sorted(Path(source).iterdir()):
        if path.is_file() and path.suffix in _MODEL_FILES and not path.name.endswith("index.json"):
            copies.append(Path(folder) / path.name)
            storage.write_bytes(copies[-1], path.read_bytes())
    return copies


def _meta_parameters(config: ModelConfig) -> dict[str, Tensor]:
    """Return every parameter of a model of this config, on the meta device."""
    with torch.device("meta"):
        return {name: parameter.detach() for name, parameter in Transformer(config).named_parameters()}


def _check_shapes(folder: str | os.PathLike[str], names: list[str], found: list[Tensor], wanted: list[Tensor]) -> None:
    for name, tensor, like in zip(names, found, wanted, strict=True):
        if tensor.shape != like.shape:
            raise InterchangeError(
                f"{os.fspath(folder)}: {name} is {tuple(tensor.shape)}, but config.json implies {tuple(like.shape)}",
                fix="check the config.json of the folder",
            )


def _rule(kind: Family, name: str, config: ModelConfig) -> tuple[str, list[str]]:
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


def _dense_linears(model: Transformer, kind: Family) -> list[str]:
    """Return their names of the linear layers that are not quantised, among them the output projection."""
    names = ["lm_head"]
    for name, module in model.blocks.named_modules():
        if type(module) is Linear:
            names += [
                source.removesuffix(".weight") for source in _rule(kind, f"blocks.{name}.weight", model.config)[1]
            ]
        if isinstance(module, Experts) and not isinstance(module, QuantisedExperts):
            for part in ("gate_up", "down"):
                sources = _rule(kind, f"blocks.{name}.{part}", model.config)[1]
                names += [source.removesuffix(".weight") for source in sources]
    return names


def _own_quantised(model: Transformer) -> Iterator[tuple[str, QuantisedLinear]]:
    """Yield the quantised layers by the names of the parameters that they replace."""
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            yield name.removesuffix("_codes") if isinstance(module, StackedCodes) else f"{name}.weight", module


def _own_weights(model: Transformer) -> Iterator[tuple[str, Tensor | QuantisedLinear]]:
    yield from _own_quantised(model)
    for name, parameter in model.named_parameters():
        yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _dtypes(model: Transformer, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the dtype in which each parameter is written; parameters of other ranks get that of the first one here."""
    here = {name: parameter.dtype for name, parameter in model.named_parameters()}
    usual = dtype or next(iter(here.values()))
    return {
        name: torch.float32 if _stays_fp32(name) else dtype or here.get(name, usual)
        for name in _meta_parameters(model.config)
    }


def _stays_fp32(name: str) -> bool:
    """Return whether a parameter is fp32 in checkpoints of any dtype: routers compare sums with it."""
    return name.endswith("router.correction_bias")


def _plan(
    config: ModelConfig,
    kind: Family,
    dtypes: Mapping[str, torch.dtype],
    max_shard_bytes: int,
    quantised: Mapping[str, QuantisedLinear],
) -> list[list[TensorEntry]]:
    """Return the tensors of each file; shapes of dense ones follow from the config, so no weight is needed."""
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for name, parameter in _meta_parameters(config).items():
        for their_name, tensor in _made(name, quantised.get(name, parameter.to(dtypes[name])), config, kind, dtypes):
            if shards[-1] and size + tensor.nbytes > max_shard_bytes:
                shards.append([])
                size = 0
            code = CODES[str(tensor.dtype).removeprefix("torch.")]
            shards[-1].append(TensorEntry(their_name, code, tuple(tensor.shape), tensor.nbytes))
            size += tensor.nbytes
    return shards


def _their_tensors(
    weights: Iterator[tuple[str, Tensor | QuantisedLinear | None]],
    config: ModelConfig,
    kind: Family,
    dtypes: Mapping[str, torch.dtype],
) -> Iterator[tuple[str, Tensor]]:
    for name, value in weights:
        if name in dtypes and value is not None:
            plain = value.detach().to(device="cpu", dtype=dtypes[name]) if isinstance(value, Tensor) else value
            yield from _made(name, plain, config, kind, dtypes)


def _made(
    name: str, value: Tensor | QuantisedLinear, config: ModelConfig, kind: Family, dtypes: Mapping[str, torch.dtype]
) -> list[tuple[str, Tensor]]:
    """Return their tensors of one of our parameters."""
    operation, names = _rule(kind, name, config)
    if isinstance(value, QuantisedLinear):
        return write_layer(value, operation, names, config, next(iter(dtypes.values())))
    return list(zip(names, OPERATIONS[operation].write(value, config), strict=True))


def _write_shards(target: Path, shards: list[list[TensorEntry]], tensors: Iterator[tuple[str, Tensor]]) -> None:
    names = [_WHOLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    stale = {path.name for path in target.glob("model*.safetensors")} - set(names)
    places = {entry.name: file for file, shard in zip(names, shards, strict=True) for entry in shard}
    writers: dict[str, SafetensorsWriter] = {}
    try:
        for file, shard in zip(names, shards, strict=True):
            writers[file] = SafetensorsWriter(target / file, shard)
        missing = set(places)
        for name, tensor in tensors:
            content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            writers[places[name]].write(name, memoryview(content))  # type: ignore[arg-type]
            missing.discard(name)
        if missing:
            raise InterchangeError(f"{target}: no weights came for {min(missing)}", fix="give every parameter")
        for writer in writers.values():
            writer.close()
    except BaseException:
        for writer in writers.values():
            writer.abort()
        raise
    if len(shards) > 1:
        total = sum(entry.size for shard in shards for entry in shard)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        storage.write_text(target / _INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    else:
        storage.remove_file(target / _INDEX)
    for name in stale:
        storage.remove_file(target / name)


def _tensor_files(folder: Path) -> dict[str, str]:
    if (folder / _INDEX).exists():
        places = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(places, dict):
            raise CorruptFileError(f"{folder / _INDEX} has no weight_map", fix="save or fetch the checkpoint again")
        return {key: str(folder / name) for key, name in places.items()}
    path = folder / _WHOLE
    if not path.exists():
        raise StorageError(
            f"{folder} holds no {_WHOLE}", fix="save the checkpoint as safetensors; pickle is never read"
        )
    with _open(str(path)) as file:
        return dict.fromkeys(file.keys(), str(path))


def _open(path: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(
            f"{path} is not a complete safetensors file: {error}", fix="save or fetch the checkpoint again"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(storage.read_text(path))
    except ValueError as error:
        raise CorruptFileError(f"{path} is not JSON: {error}", fix="save or fetch the checkpoint again") from error
    if not isinstance(tree, dict):
        raise CorruptFileError(f"{path} is not a JSON object", fix="save or fetch the checkpoint again")
    return tree


@torch.no_grad()
def _copy(target: Tensor, source: Tensor) -> None:
    if isinstance(target, DTensor):
        moved = source.to(device=target.device, dtype=target.dtype).contiguous()
        target.copy_(distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None))
    else:
        target.copy_(source)
