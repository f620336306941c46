"""Models larger than the device: build without memory, spread over devices, keep parts on the CPU or on disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from piledriver.compat.accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from piledriver.compat.accelerate.utils.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from piledriver.compat.accelerate.utils.device_map import check_device_map, get_balanced_memory, infer_auto_device_map
from piledriver.compat.accelerate.utils.module_tensors import find_tied_parameters, retie_parameters
from piledriver.compat.accelerate.utils.offload import OffloadedWeightsLoader, offload_state_dict
from piledriver.compat.accelerate.utils.weights import load_checkpoint_in_model


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Parameters made within the block have shapes and no memory."""
    with init_on_device(torch.device("meta"), include_buffers=bool(include_buffers)):
        yield


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Parameters made within the block are on a device, and buffers too where asked."""
    if include_buffers:
        with device:
            yield
        return
    register = nn.Module.register_parameter

    def on_device(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        held = module._parameters[name]
        if held is not None and held.device != device:
            kept = {key: value for key, value in held.__dict__.items() if key != "requires_grad"}
            moved = type(held)(held.to(device), requires_grad=held.requires_grad)
            moved.__dict__.update(kept)
            module._parameters[name] = moved

    nn.Module.register_parameter = on_device  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def cpu_offload(
    model: nn.Module,
    execution_device: Any = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Weights stay on the CPU and visit the device for their own forward."""
    device = execution_device if execution_device is not None else next(iter(model.parameters())).device
    kept = state_dict if state_dict is not None else {n: p.to("cpu") for n, p in model.state_dict().items()}
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        offload_buffers=offload_buffers,
        weights_map=kept,
        preload_module_classes=preload_module_classes,
    )
    return model


def cpu_offload_with_hook(
    model: nn.Module, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """The whole model visits the device, and stays until the next one of a chain is called."""
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
    """Weights stay on disk and visit the device for their own forward."""
    if not os.path.isfile(os.path.join(offload_dir, "index.json")):
        offload_state_dict(offload_dir, model.state_dict())
    device = execution_device if execution_device is not None else next(iter(model.parameters())).device
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        offload_buffers=offload_buffers,
        weights_map=OffloadedWeightsLoader(save_folder=offload_dir),
        preload_module_classes=preload_module_classes,
    )
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
    """Spread a model over devices as a map says."""
    check_device_map(model, device_map)
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    if len(set(device_map.values())) == 1 and not on_disk and not force_hooks:
        device = next(iter(device_map.values()))
        model.to(device)
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model
    if on_disk and offload_dir is None and offload_index is None:
        raise ValueError(
            "We need an `offload_dir` to dispatch this model according to this `device_map`, the following submodules "
            f"need to be offloaded: {', '.join(on_disk)}."
        )
    main = main_device if main_device is not None else _main_device(device_map)
    on_cpu = [name for name, device in device_map.items() if device == "cpu"] if main != "cpu" else []
    if state_dict is None and on_cpu:
        state_dict = _parts(model.state_dict(), on_cpu)
    if on_disk and offload_index is None and not os.path.isfile(os.path.join(str(offload_dir), "index.json")):
        offload_state_dict(str(offload_dir), _parts(model.state_dict(), on_disk))
    tied = find_tied_parameters(model)
    weights_map = None
    if on_cpu or on_disk:
        weights_map = OffloadedWeightsLoader(
            state_dict=dict(state_dict) if state_dict else None, save_folder=offload_dir, index=offload_index
        )
    away = {name: name in on_cpu or name in on_disk for name in device_map}
    runs_on = {name: main if away[name] else device for name, device in device_map.items()}
    if "" in device_map:
        blocks = [("", model)]
    else:
        add_hook_to_module(model, AlignDevicesHook(main, io_same_device=True, skip_keys=skip_keys))
        blocks = list(model.named_children())
    for name, block in blocks:
        attach_align_device_hook_on_blocks(
            block, runs_on, away, weights_map, offload_buffers, name, skip_keys, preload_module_classes
        )
    retie_parameters(model, tied)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _main_device(device_map: Mapping[str, Any]) -> Any:
    devices = [device for device in device_map.values() if device not in ("cpu", "disk")]
    return devices[0] if devices else "cpu"


def _parts(state: Mapping[str, torch.Tensor], modules: list[str]) -> dict[str, torch.Tensor]:
    wanted = tuple(name + "." for name in modules)
    return {k: v for k, v in state.items() if "" in modules or k in modules or k.startswith(wanted)}


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
    """Load weights straight to where a device map wants them, and spread the model."""
    if isinstance(device_map, str):
        if device_map not in ("auto", "balanced", "balanced_low_0", "sequential"):
            raise ValueError(
                "If passing a string for `device_map`, choose 'auto', 'balanced', 'balanced_low_0' or 'sequential'."
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
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map=device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: Any = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
    _prefix: str = "",
) -> None:
    """Store the weights of every layer in a small type and compute in another."""
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    skipped = (skip_modules_classes is not None and isinstance(module, skip_modules_classes)) or any(
        re.search(pattern, _prefix) for pattern in patterns
    )
    if skipped:
        return
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        add_hook_to_module(module, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
        return
    for name, child in module.named_children():
        attach_layerwise_casting_hooks(
            child,
            storage_dtype,
            compute_dtype,
            skip_modules_pattern,
            skip_modules_classes,
            non_blocking,
            f"{_prefix}.{name}" if _prefix else name,
        )
