"""Checkpoint folders of `transformers`: config.json and safetensors, one file or sharded. Pickle is never read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, StorageError
from piledriver.models.config import ModelConfig
from piledriver.models.interchange.config_json import InterchangeError, read_config, write_config
from piledriver.models.interchange.families import Family, family
from piledriver.models.interchange.tensors import OPERATIONS
from piledriver.models.transformer import Transformer

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def load_folder(
    folder: str | os.PathLike[str], *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> Transformer:
    """Return a model with the weights of a checkpoint folder, in `dtype` (default: that of its embedding)."""
    config, theirs = read_folder_config(folder)
    with torch.device("meta"):
        model = Transformer(config)
    weights = read_weights(folder, config, str(theirs["model_type"]))
    first_name, first = next(weights)
    model.to(dtype or first.dtype).to_empty(device=device)
    targets = dict(model.named_parameters())
    _copy(targets[first_name], first)
    for name, tensor in weights:
        _copy(targets[name], tensor)
    return model


def load_weights(model: Transformer, folder: str | os.PathLike[str]) -> None:
    """Load weights into an existing model, sharded or not, one tensor at a time. The configs must be equal."""
    config, theirs = read_folder_config(folder)
    if config != model.config:
        raise InterchangeError(
            f"the config of {os.fspath(folder)} is of another shape than the model's",
            fix="build the model from that config",
        )
    targets = dict(model.named_parameters())
    for name, tensor in read_weights(folder, config, str(theirs["model_type"])):
        if name in targets:
            _copy(targets[name], tensor)


def read_folder_config(folder: str | os.PathLike[str]) -> tuple[ModelConfig, dict[str, Any]]:
    """Return the `ModelConfig` of a checkpoint folder, and the content of its config.json."""
    theirs = _read_json(Path(folder) / "config.json")
    return read_config(theirs), theirs


def read_weights(folder: str | os.PathLike[str], config: ModelConfig, model_type: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (our name, tensor) of every parameter. Missing or unknown tensors raise `InterchangeError`."""
    kind, files = family(model_type), _tensor_files(Path(folder))
    unread = set(files)
    with ExitStack() as stack:
        handles = {path: stack.enter_context(_open(path)) for path in sorted(set(files.values()))}
        for name in _parameter_names(config):
            operation, sources = _rule(kind, name, config)
            parts = []
            for source in sources:
                found = source if source in files else source.removeprefix(kind.prefix)
                if found not in files:
                    raise InterchangeError(f"{os.fspath(folder)} has no tensor {source}", fix="check its config.json")
                unread.discard(found)
                parts.append(handles[files[found]].get_tensor(found))
            yield name, OPERATIONS[operation].read(parts, config)
    allowed = [*kind.ignore, *([re.escape(kind.weights["head.weight"][1])] if config.tied else [])]
    left = sorted(key for key in unread if not any(re.search(pattern, key) for pattern in allowed))
    if left:
        raise InterchangeError(
            f"{os.fspath(folder)} holds {len(left)} tensors that are not in a {kind.name} model of its config, "
            f"first {left[0]}",
            fix="check its config.json",
        )


def save_folder(
    model: Transformer,
    folder: str | os.PathLike[str],
    *,
    model_type: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that `transformers` loads to a model with the same logits.

    `extra` is added to config.json, for example eos_token_id, which the model does not know.
    """
    theirs = write_config(model.config, model_type)
    kind = family(str(theirs["model_type"]))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    kept_dtype = None
    for name, tensor in _their_tensors(model, kind, dtype):
        kept_dtype = kept_dtype or tensor.dtype
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    _write_shards(target, shards)
    theirs |= {"dtype": str(kept_dtype).removeprefix("torch."), **(extra or {})}
    storage.write_text(target / "config.json", json.dumps(theirs, indent=2, sort_keys=True) + "\n")


def _parameter_names(config: ModelConfig) -> list[str]:
    """Return the name of every parameter of a model of this config."""
    with torch.device("meta"):
        return [name for name, _ in Transformer(config).named_parameters()]


def _rule(kind: Family, name: str, config: ModelConfig) -> tuple[str, list[str]]:
    """Return the operation of one of our parameters, and their tensors in the order that it takes."""
    layer = next(iter(re.findall(r"^blocks\.(\d+)\.", name)), "")
    pattern = re.sub(r"^blocks\.\d+\.", "blocks.{i}.", name)
    if pattern not in kind.weights:
        raise InterchangeError(f"family {kind.name} has no tensor for {name}", fix="choose another model_type")
    operation, *sources = kind.weights[pattern]
    experts = range(config.moe.experts if config.moe else 0)
    expanded = [
        source.replace("{i}", layer).replace("{e}", str(expert))
        for source in sources
        for expert in (experts if "{e}" in source else [0])
    ]
    return operation, expanded


def _their_tensors(model: Transformer, kind: Family, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        value = value.detach().to(device="cpu", dtype=dtype or value.dtype)
        operation, names = _rule(kind, name, model.config)
        yield from zip(names, OPERATIONS[operation].write(value, model.config), strict=True)


def _write_shards(target: Path, shards: list[dict[str, Tensor]]) -> None:
    names = [_WHOLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    stale = {path.name for path in target.glob("model*.safetensors")} - set(names)
    for name, tensors in zip(names, shards, strict=True):
        _save(tensors, target / name)
    if len(shards) > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        storage.write_text(target / _INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    else:
        storage.remove(target / _INDEX)
    for name in stale:
        storage.remove(target / name)


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    partial = path.with_name(f".{path.name}.partial")
    try:
        # transformers rejects a file whose metadata does not name the framework.
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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
    if target.shape != source.shape:
        raise InterchangeError(
            f"a tensor is {tuple(source.shape)}, but the config implies {tuple(target.shape)}",
            fix="check the config.json of the folder",
        )
    if isinstance(target, DTensor):
        moved = source.to(device=target.device, dtype=target.dtype).contiguous()
        target.copy_(distribute_tensor(moved, target.device_mesh, target.placements, src_data_rank=None))
    else:
        target.copy_(source)
