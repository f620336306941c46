"""Single tensors of a module: list them, move one to a device, find tied ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from piledriver.engine.shards import tied_parameters
from piledriver.serve.placement.errors import PlacementError


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of buffers that a state dict omits; with `recurse` and `fqns`, the names seen from `module`."""
    found: set[str] = set(module._non_persistent_buffers_set)
    if recurse:
        for name, child in module.named_modules():
            prefix = f"{name}." if fqns and name else ""
            found |= {prefix + buffer for buffer in child._non_persistent_buffers_set}
    return found


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, then buffers, with their names."""
    yield from module.named_parameters(recurse=recurse)
    if include_buffers:
        omitted = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
        for name, buffer in module.named_buffers(recurse=recurse):
            if name not in omitted:
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
    """Move one parameter or buffer to a device, with `value` as its new content where given.

    Floating-point values are cast to `dtype`, or to the tensor's type if `dtype` is None. A tensor on the meta device
    needs a value.
    """
    owner, _, leaf = tensor_name.rpartition(".")
    holder = module.get_submodule(owner)
    if leaf not in holder._parameters and leaf not in holder._buffers:
        raise PlacementError(f"{holder} does not have a parameter or a buffer named {leaf}.")
    is_buffer = leaf in holder._buffers
    old: Any = holder._buffers[leaf] if is_buffer else holder._parameters[leaf]
    if old is None and value is None:
        return
    if old is not None and old.device.type == "meta" and torch.device(device).type != "meta" and value is None:
        raise PlacementError(
            f"{tensor_name} is on the meta device and cannot be moved to {device}", fix="pass its content as `value`"
        )
    if value is not None and old is not None and value.shape != old.shape:
        raise PlacementError(
            f'Trying to set a tensor of shape {value.shape} in "{leaf}" (which has shape {old.shape}), this looks '
            "incorrect."
        )
    source = old if value is None else value
    wanted = dtype if dtype is not None else None if old is None or value is None else old.dtype
    if wanted is not None and source.dtype != wanted and not _is_integer(source.dtype):
        source = source.to(wanted)
    with torch.no_grad():
        moved = source.detach().to(device, non_blocking=non_blocking)
    if is_buffer:
        holder._buffers[leaf] = moved
        return
    if old is not None and value is None and old.device == moved.device:
        return
    trains = (old is None or old.requires_grad) and not _is_integer(moved.dtype)
    holder._parameters[leaf] = nn.Parameter(moved, requires_grad=trains)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return groups of names that share one parameter, each sorted."""
    return [sorted(group) for group in tied_parameters.find_tied(model)]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Make each group one parameter again: the first that is not on the meta device, or the first of all."""
    for group in tied_params:
        with_value = [name for name in group if model.get_parameter(name).device.type != "meta"]
        first = (with_value or group)[0]
        tied_parameters.retie(model, [[first, *(name for name in group if name != first)]])


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return a key that is equal for tensors that share memory: device, address, size in bytes."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether a module's weights are offloaded between calls."""
    return offloading_hook(module) is not None


def offloading_hook(module: nn.Module) -> Any:
    """Return the hook that offloads a module's weights, alone or among others; None without one."""
    hook: Any = getattr(module, "_hf_hook", None)
    queue = [hook]
    while queue:
        one = queue.pop(0)
        # AlignDevicesHook is the only hook with this attribute; importing its class here would be circular.
        if getattr(one, "offload", False):
            return one
        queue += getattr(one, "hooks", ())
    return None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Any = None) -> Iterator[None]:
    """Keep a module's own weights on a device within the block, and restore their places after it."""
    hook = offloading_hook(module)
    if hook is not None:
        with hook.aligned(module, execution_device):
            yield
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
    """Return whether peft wraps this model."""
    return any(kind.__name__ == "PeftModel" for kind in type(model).__mro__)
