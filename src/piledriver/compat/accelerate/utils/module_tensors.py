"""Single tensors of a module: by name, on another device, tied to others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from piledriver.engine import tied_weights as tied


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of buffers that a state dict leaves out."""
    found: set[str] = set(module._non_persistent_buffers_set)
    if recurse:
        for name, child in module.named_modules():
            prefix = f"{name}." if fqns and name else ""
            found |= {prefix + buffer for buffer in child._non_persistent_buffers_set}
    return found


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
        for name, buffer in module.named_buffers(recurse=recurse):
            if name not in left_out:
                yield name, buffer


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: torch.Tensor | None = None,
    dtype: Any = None,
    fp16_statistics: Any = None,
    tied_params_map: Any = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put one tensor on a device, with a value where it has none or another one is wanted."""
    owner, _, leaf = tensor_name.rpartition(".")
    holder = module.get_submodule(owner)
    if leaf not in holder._parameters and leaf not in holder._buffers:
        raise ValueError(f"{holder} does not have a parameter or a buffer named {leaf}.")
    is_buffer = leaf in holder._buffers
    old: Any = holder._buffers[leaf] if is_buffer else holder._parameters[leaf]
    if old is None and value is None:
        return
    if old is not None and old.device.type == "meta" and torch.device(device).type != "meta" and value is None:
        raise ValueError(f"{leaf} is on the meta device, we need a `value` to put in on {device}.")
    if value is not None and old is not None and value.shape != old.shape:
        raise ValueError(
            f'Trying to set a tensor of shape {value.shape} in "{leaf}" (which has shape {old.shape}), this looks '
            "incorrect."
        )
    source = old if value is None else value
    kind = dtype if dtype is not None else None if old is None or value is None else old.dtype
    if kind is not None and source.dtype != kind and not _is_integer(source.dtype):
        source = source.to(kind)
    with torch.no_grad():
        moved = source.detach().to(device, non_blocking=non_blocking)
    if is_buffer:
        holder._buffers[leaf] = moved
        return
    if old is not None and value is None and old.device == moved.device:
        return
    made = nn.Parameter(moved, requires_grad=bool(old is None or old.requires_grad) and not _is_integer(moved.dtype))
    holder._parameters[leaf] = made


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Groups of names that share one parameter."""
    return [sorted(group) for group in tied.find_tied(model)]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Make each group one parameter again; one that has a value wins over those that were left without."""
    for group in tied_params:
        with_value = [name for name in group if model.get_parameter(name).device.type != "meta"]
        first = (with_value or group)[0]
        tied.retie(model, [[first, *(name for name in group if name != first)]])


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """What identifies the memory behind a tensor."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a module's weights are kept away between calls."""
    # Of the hooks only AlignDevicesHook offloads; asking for its class here would import in a circle.
    return bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


@contextmanager
def align_module_device(module: nn.Module, execution_device: Any = None) -> Iterator[None]:
    """A module's own weights are on a device within the block, and back where they were after it."""
    if has_offloaded_params(module):
        hook: Any = module._hf_hook
        before = hook.execution_device
        hook.execution_device = execution_device if execution_device is not None else before
        hook.pre_forward(module)
        try:
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = before
        return
    if execution_device is None:
        yield
        return
    devices = {name: parameter.device for name, parameter in module.named_parameters(recurse=False)}
    for name in devices:
        set_module_tensor_to_device(module, name, execution_device)
    try:
        yield
    finally:
        for name, device in devices.items():
            set_module_tensor_to_device(module, name, device)


def is_peft_model(model: nn.Module) -> bool:
    """Whether peft wrapped this model."""
    return any(kind.__name__ == "PeftModel" for kind in type(model).__mro__)
