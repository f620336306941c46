"""Dispatch a model: run it on accelerators while its weights are on several devices, on the CPU or on disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from piledriver.serve.placement.align_devices import AlignDevicesHook
from piledriver.serve.placement.errors import PlacementError
from piledriver.serve.placement.hooks import add_hook_to_module
from piledriver.serve.placement.load_checkpoint import load_weights_to_map, prefix_in
from piledriver.serve.placement.maps.device_map import check_device_map, get_balanced_memory, infer_auto_device_map
from piledriver.serve.placement.model_offload import CpuOffload, UserCpuOffloadHook
from piledriver.serve.placement.streaming import Sources, place_modules, stream_weights
from piledriver.serve.placement.tensors import find_tied_parameters, retie_parameters
from piledriver.serve.placement.weight_files import (
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    offload_state_dict,
)


def cpu_offload(
    model: nn.Module,
    execution_device: Any = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep weights on the CPU and stream them to the execution device, block by block, ahead of their use.

    Return the model.
    """
    device = execution_device if execution_device is not None else next(iter(model.parameters())).device
    state = dict(state_dict if state_dict is not None else model.state_dict())
    weights = OffloadedWeightsLoader(state_dict=state)
    del state
    return _offload(model, device, weights, offload_buffers, preload_module_classes)


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until its forward; it leaves the device when the next model of a pipeline runs.

    Return the model and a handle to offload it earlier.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Any = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep weights in files and stream them to the execution device, block by block, ahead of their use.

    Return the model. A folder that holds offloaded weights already is used as it is.
    """
    if not os.path.isfile(os.path.join(offload_dir, "index.json")):
        offload_state_dict(offload_dir, model.state_dict())
    device = execution_device if execution_device is not None else next(iter(model.parameters())).device
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload(model, device, weights, offload_buffers, preload_module_classes)


def _offload(
    model: nn.Module,
    device: Any,
    weights: Mapping[str, torch.Tensor],
    offload_buffers: bool,
    preload_module_classes: list[str] | None,
) -> nn.Module:
    tied = find_tied_parameters(model)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    stream_weights(
        model,
        device,
        Sources(weights, tied),
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
    )
    retie_parameters(model, tied)
    return model


def dispatch_model(
    model: nn.Module,
    device_map: dict[str, Any],
    main_device: Any = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: Any = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Place the modules of a model on the devices of a map and stream the others to the main device; return the model.

    Weights on the CPU and on disk come to the device block by block while earlier blocks compute.
    """
    check_device_map(model, device_map)
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    if len(set(device_map.values())) == 1 and not on_disk and not force_hooks:
        device = next(iter(device_map.values()))
        model.to(device)
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model
    if on_disk and offload_dir is None and offload_index is None:
        raise PlacementError(f"the device map offloads {', '.join(on_disk)} to disk", fix="pass an `offload_dir`")
    main = main_device if main_device is not None else _main_device(device_map)
    on_cpu = [name for name, device in device_map.items() if device == "cpu"] if main != "cpu" else []
    if state_dict is None and on_cpu:
        state_dict = _state_of(model, on_cpu)
    if on_disk and offload_index is None and not os.path.isfile(os.path.join(str(offload_dir), "index.json")):
        offload_state_dict(str(offload_dir), _state_of(model, on_disk))
    tied = find_tied_parameters(model)
    offloaded = {*on_cpu, *on_disk}

    def is_offloaded(name: str) -> bool:
        return prefix_in(name, device_map) in offloaded

    def device_of(name: str) -> Any:
        at = prefix_in(name, device_map)
        return None if at is None or at in offloaded else device_map[at]

    _attach_placed(model, device_map, main, offloaded, skip_keys)
    here = {name: device for name, device in device_map.items() if name not in offloaded}
    place_modules(model, here, device_of)
    if offloaded:
        weights = OffloadedWeightsLoader(
            state_dict=dict(state_dict) if state_dict else None, save_folder=offload_dir, index=offload_index
        )
        state_dict = None
        stream_weights(
            model,
            main,
            Sources(weights, tied),
            is_offloaded,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
        )
    retie_parameters(model, tied)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _attach_placed(
    model: nn.Module, device_map: Mapping[str, Any], main: Any, offloaded: set[str], skip_keys: Any
) -> None:
    """Make the model take inputs from any device, and each module of the map inputs of another device."""
    add_hook_to_module(model, AlignDevicesHook(main, io_same_device=True, skip_keys=skip_keys))
    several = len({str(main if name in offloaded else device) for name, device in device_map.items()}) > 1
    modules = dict(model.named_modules())
    for name, device in device_map.items():
        if several and name and name in modules:
            place = main if name in offloaded else device
            add_hook_to_module(modules[name], AlignDevicesHook(place, skip_keys=skip_keys))


def _main_device(device_map: Mapping[str, Any]) -> Any:
    devices = [device for device in device_map.values() if device not in ("cpu", "disk")]
    return devices[0] if devices else "cpu"


def _state_of(model: nn.Module, modules: list[str]) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return dict(state) if "" in modules else extract_submodules_state_dict(state, modules)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Any = None,
    max_memory: dict[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: Any = None,
    offload_state_dict: bool | None = None,
    skip_keys: Any = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Load weights to the devices of a map, which may be inferred by policy, and dispatch the model; return it."""
    if isinstance(device_map, str):
        if device_map not in ("auto", "balanced", "balanced_low_0", "sequential"):
            raise PlacementError(
                f"unknown device map {device_map!r}", fix="choose 'auto', 'balanced', 'balanced_low_0' or 'sequential'"
            )
        if device_map != "sequential":
            max_memory = get_balanced_memory(
                model,
                max_memory=max_memory,
                no_split_module_classes=no_split_module_classes,
                dtype=dtype,
                low_zero=device_map == "balanced_low_0",
            )
        device_map = infer_auto_device_map(
            model,
            max_memory=max_memory,
            no_split_module_classes=no_split_module_classes,
            dtype=dtype,
            offload_buffers=offload_buffers,
        )
    index = load_weights_to_map(model, checkpoint, device_map, offload_folder, dtype, offload_buffers, strict)
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map=device_map,
        offload_dir=offload_folder,
        offload_index=index or None,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )
