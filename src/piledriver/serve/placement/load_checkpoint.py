"""Load weights from files into a model, each straight to the device that a device map gives it."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from piledriver.core import storage
from piledriver.engine.offload.disk.extents import Extent
from piledriver.engine.offload.stream.weight_block import read_extents
from piledriver.serve.placement.direct_load import find_extents, load_extents, offload_entry
from piledriver.serve.placement.errors import PlacementError, StrictLoadError
from piledriver.serve.placement.tensors import (
    align_module_device,
    find_tied_parameters,
    has_offloaded_params,
    retie_parameters,
    set_module_tensor_to_device,
)
from piledriver.serve.placement.weight_files import offload_weight, removed_on_error, save_offload_index

_log = logging.getLogger(__name__)


def load_state_dict(checkpoint_file: Any, device_map: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Return the tensors of a file; those of a safetensors file are read straight to their devices."""
    if str(checkpoint_file).endswith(".safetensors"):
        from safetensors import safe_open

        with safe_open(str(checkpoint_file), framework="pt") as file:
            devices = {key: _device_of(key, device_map or {}, "cpu") for key in file.keys()}  # noqa: SIM118
            return {key: file.get_tensor(key).to("cpu" if to == "disk" else to) for key, to in devices.items()}
    loaded: dict[str, torch.Tensor] = torch.load(checkpoint_file, map_location="cpu", weights_only=True)
    return loaded


def checkpoint_files(checkpoint: Any) -> list[Path]:
    """Return the files of a checkpoint, which is a file, an index, or a folder with either."""
    path = Path(checkpoint)
    if path.is_file():
        return _files_of_index(path) if path.name.endswith(".json") else [path]
    if not path.is_dir():
        raise PlacementError(
            f"there is no checkpoint at {checkpoint}",
            fix="give a file with a state dict, the index of a sharded checkpoint, or a folder with either",
        )
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (path / name).is_file():
            return [path / name]
    indexes = sorted(file for file in path.iterdir() if file.name.endswith(".index.json"))
    if len(indexes) != 1:
        raise PlacementError(
            f"{checkpoint} has {len(indexes)} files `*.index.json`, no model.safetensors and no pytorch_model.bin",
            fix="give the file of the weights or the index itself",
        )
    return _files_of_index(indexes[0])


def _files_of_index(index: Path) -> list[Path]:
    content = json.loads(storage.read_text(index))
    names = content.get("weight_map", content)
    return [index.parent / name for name in sorted(set(names.values()))]


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: Any,
    device_map: Mapping[str, Any] | None = None,
    offload_folder: Any = None,
    dtype: Any = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load weights in place: each to its device of the map; those mapped to disk go to files in `offload_folder`.

    With `strict`, raise `StrictLoadError` where the checkpoint lacks weights of the model or holds others.
    """
    load_weights_to_map(model, checkpoint, device_map, offload_folder, dtype, offload_buffers, strict)


def load_weights_to_map(
    model: nn.Module,
    checkpoint: Any,
    device_map: Mapping[str, Any] | None,
    offload_folder: Any = None,
    dtype: Any = None,
    offload_buffers: bool = False,
    strict: bool = False,
) -> dict[str, Any]:
    """Load weights as `load_checkpoint_in_model` does; return the index of those that stay on disk."""
    tied = find_tied_parameters(model)
    index: dict[str, Any] = {}
    writes = offload_folder is not None and device_map is not None and "disk" in device_map.values()
    with removed_on_error(index, offload_folder) if writes else contextlib.nullcontext():
        seen = _place_weights(model, checkpoint, device_map, index, offload_folder, dtype, offload_buffers)
        _check_names(model, checkpoint, seen, tied, strict)
        if offload_folder is not None:
            save_offload_index(index, offload_folder)
    retie_parameters(model, tied)
    return index


def _check_names(model: nn.Module, checkpoint: Any, seen: set[str], tied: list[list[str]], strict: bool) -> None:
    expected = set(model.state_dict())
    unused = seen - expected
    if unused:
        message = (
            f"Some weights of the checkpoint at {checkpoint} were not used when initializing {type(model).__name__}"
        )
        if strict:
            raise StrictLoadError(f"{message}: {sorted(unused)}")
        _log.warning("%s: %s", message, sorted(unused))
    missing = expected - seen - _tied_to_seen(tied, seen)
    if strict and missing:
        raise StrictLoadError(f"the checkpoint at {checkpoint} lacks {sorted(missing)}")


def _place_weights(
    model: nn.Module,
    checkpoint: Any,
    device_map: Mapping[str, Any] | None,
    index: dict[str, Any],
    offload_folder: Any = None,
    dtype: Any = None,
    offload_buffers: bool = False,
) -> set[str]:
    """Load the weights of a checkpoint to the devices of a map; add those on disk to `index`, return all names.

    Safetensors files are read past the page cache straight to their devices; weights on disk stay in these files where
    their dtype is the wanted one.
    """
    files = checkpoint_files(checkpoint)
    wanted = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    seen: set[str] = set()
    expected, buffers = set(model.state_dict()), set(dict(model.named_buffers()))

    def on_disk(name: str) -> bool:
        return _device_of(name, device_map or {}) == "disk" and (offload_buffers or name not in buffers)

    if device_map is None:
        for file in files:
            state = load_state_dict(file, device_map)
            seen |= set(state)
            model.load_state_dict({k: v for k, v in state.items() if k in expected}, strict=False)
        return seen
    if "disk" in device_map.values():
        direct = all(file.suffix == ".safetensors" for file in files)
        if offload_folder is None and not (direct and wanted is None):
            raise PlacementError("the device map offloads modules to disk", fix="pass an `offload_folder`")
    extents = find_extents(file for file in files if file.suffix == ".safetensors")
    seen |= set(extents)
    here: dict[str, Extent] = {}
    for name, extent in extents.items():
        if name not in expected:
            continue
        if not on_disk(name):
            here[name] = extent
        elif wanted is None or wanted == extent.dtype or not extent.dtype.is_floating_point:
            index[name] = offload_entry(name, extent)
            set_module_tensor_to_device(model, name, "meta")
        else:
            offload_weight(read_extents([extent])[0].to(wanted), name, offload_folder, index)
            set_module_tensor_to_device(model, name, "meta")
    load_extents(model, here, lambda name: _memory_device(name, device_map), wanted)
    for file in files:
        if file.suffix != ".safetensors":
            state = load_state_dict(file, device_map)
            seen |= set(state)
            for name, tensor in state.items():
                if name in expected:
                    kind = wanted if wanted is not None and tensor.is_floating_point() else None
                    if on_disk(name):
                        offload_weight(tensor if kind is None else tensor.to(kind), name, offload_folder, index)
                        set_module_tensor_to_device(model, name, "meta")
                    else:
                        at = _memory_device(name, device_map)
                        set_module_tensor_to_device(model, name, at, value=tensor, dtype=kind)
    return seen


def _memory_device(name: str, device_map: Mapping[str, Any]) -> Any:
    device = _device_of(name, device_map)
    return "cpu" if device == "disk" else device


def _tied_to_seen(tied: list[list[str]], seen: set[str]) -> set[str]:
    return {name for group in tied if seen & set(group) for name in group}


def prefix_in(name: str, device_map: Mapping[str, Any]) -> str | None:
    """Return the longest entry of a device map that holds a name; None without one.

    >>> prefix_in("a.b.weight", {"a": 0, "a.b": 1})
    'a.b'
    """
    parts = name.split(".")
    for depth in range(len(parts), -1, -1):
        if ".".join(parts[:depth]) in device_map:
            return ".".join(parts[:depth])
    return None


def _device_of(name: str, device_map: Mapping[str, Any], default: Any = None) -> Any:
    """Return the device of the longest entry of the map that holds a name."""
    at = prefix_in(name, device_map)
    if at is not None:
        return device_map[at]
    if default is not None:
        return default
    raise PlacementError(f"the device map has no device for {name}", fix="add an entry for it or its module")


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the full state dict of a model with offloaded weights, loading them module by module."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        if name == "" and not has_offloaded_params(module) and any(True for _ in module.children()):
            continue
        with align_module_device(module, "cpu") if has_offloaded_params(module) else contextlib.nullcontext():
            for key, tensor in module.state_dict().items():
                full = f"{name}.{key}" if name else key
                if tensor.device.type != "meta":
                    state[full] = tensor.detach().cpu().clone()
    order = list(model.state_dict())
    return {key: state[key] for key in order if key in state}


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Any = "cpu"
) -> dict[str, Any]:
    """Replace the entries of `state_dict` that belong to a module by its loaded tensors; return the dictionary."""
    prefix = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload):
        for key, tensor in module.state_dict().items():
            full = f"{prefix}.{key}" if prefix else key
            if full in state_dict:
                state_dict[full] = tensor.detach().to(device_to_put_offload)
    return state_dict
