"""Hooks around a module's forward: bring its weights where it runs, and take them away again.

A hook replaces `module.forward` and keeps the original, as Accelerate's do, because its users look for `_hf_hook`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from piledriver.compat.accelerate.utils.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
from piledriver.compat.accelerate.utils.module_tensors import named_module_tensors, set_module_tensor_to_device
from piledriver.compat.accelerate.utils.offload import PrefixedDataset
from piledriver.runtime.collectives.nested import find_device, send_to_device

__all__ = ["SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING"]


class ModelHook:
    """Called before and after a module's forward."""

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is put on."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Called with the inputs; returns those that forward gets."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Called with the output; returns what the caller gets."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called when the hook is taken off."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, one after the other."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Each in turn."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Each in turn."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Each in turn."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Each in turn."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Put a hook on a module; it replaces the one that is there, or comes after it with `append`."""
    held: Any = module
    if append and hasattr(module, "_hf_hook"):
        before = held._hf_hook
        remove_hook_from_module(module)
        hook = SequentialHook(before, hook)
    original = held._old_forward if hasattr(module, "_hf_hook") and hasattr(module, "_old_forward") else module.forward
    held._old_forward = original
    module = hook.init_hook(module)
    held._hf_hook = hook
    module.forward = functools.update_wrapper(functools.partial(_hooked_forward, module), original)
    return module


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = module._hf_hook.pre_forward(module, *args, **kwargs)
    if module._hf_hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return module._hf_hook.post_forward(module, output)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Take a module's hook off, and with `recurse` those of its parts."""
    held: Any = module
    if hasattr(module, "_hf_hook"):
        held._hf_hook.detach_hook(module)
        del held._hf_hook
    if hasattr(module, "_old_forward"):
        module.__dict__.pop("_old_forward")
        # The class's own forward shows again; a forward that was set by hand before comes back with `__wrapped__`.
        replaced = module.__dict__.pop("forward", None)
        original = getattr(replaced, "__wrapped__", None)
        if original is not None and getattr(original, "__func__", None) is not type(module).forward:
            module.forward = original
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Take off every hook."""
    remove_hook_from_module(module, recurse=True)


class AlignDevicesHook(ModelHook):
    """Weights and inputs are on the execution device during forward; with `offload` the weights only then."""

    def __init__(
        self,
        execution_device: Any = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Sequence[str] | None = None,
        tied_params_map: dict[int, Any] | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: Any = None
        self.original_devices: dict[str, torch.device] = {}

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Place the weights, or keep them away until forward."""
        if not self.offload:
            if self.execution_device is not None:
                for name, _ in list(named_module_tensors(module, recurse=self.place_submodules)):
                    set_module_tensor_to_device(module, name, self.execution_device)
            return module
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in self._away(module)}
        for name, _ in self._away(module):
            set_module_tensor_to_device(module, name, "meta")
        if self.execution_device is not None:
            gone = {name for name, _ in self._away(module)}
            for name, tensor in list(named_module_tensors(module, recurse=self.place_submodules)):
                if name not in gone and tensor.device.type != "meta":
                    set_module_tensor_to_device(module, name, self.execution_device)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Bring the weights and the inputs."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            assert self.weights_map is not None
            for name, _ in self._away(module):
                set_module_tensor_to_device(module, name, self.execution_device, value=self.weights_map[name])
        if self.execution_device is None:
            return args, kwargs
        return (
            send_to_device(args, self.execution_device),
            send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys),
        )

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Take the weights away, and the output back to where the inputs were."""
        if self.offload:
            for name, _ in self._away(module):
                set_module_tensor_to_device(module, name, "meta")
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """The weights are where they were before."""
        if self.offload and self.weights_map is not None:
            for name, device in self.original_devices.items():
                if device.type != "meta":
                    value = self.weights_map.get(name) if isinstance(self.weights_map, Mapping) else None
                    set_module_tensor_to_device(module, name, device, value=value)
        return module

    def _away(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """What is kept away between calls: parameters, and persistent buffers where they are offloaded too."""
        return list(
            named_module_tensors(
                module,
                include_buffers=self.offload_buffers,
                recurse=self.place_submodules,
                remove_non_persistent=True,
            )
        )

    def __repr__(self) -> str:
        return (
            f"AlignDevicesHook(execution_device={self.execution_device}, offload={self.offload}, "
            f"io_same_device={self.io_same_device}, offload_buffers={self.offload_buffers}, "
            f"place_submodules={self.place_submodules}, skip_keys={self.skip_keys!r})"
        )


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Any,
    skip_keys: Any = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Any = None,
) -> None:
    """Make every part that has weights run on a device."""
    if not hasattr(module, "_hf_hook") and len(module.state_dict()) > 0:
        add_hook_to_module(module, AlignDevicesHook(execution_device, skip_keys=skip_keys))
    if preload_module_classes is not None and type(module).__name__ in preload_module_classes:
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Any = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Any = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Any = None,
) -> None:
    """Put an `AlignDevicesHook` on every part that holds weights of its own."""
    whole = preload_module_classes is not None and type(module).__name__ in preload_module_classes
    if whole or any(True for _ in named_module_tensors(module)):
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=PrefixedDataset(weights_map, prefix) if weights_map is not None else None,
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            f"{module_name}.{name}" if module_name else name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Any = None,
    offload: Any = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Any = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: Any = None,
) -> None:
    """The same for a model that is split by a device map: `execution_device` and `offload` are by block."""
    if not isinstance(execution_device, Mapping):
        single = {module_name: execution_device}
        spread = {module_name: offload}
        attach_align_device_hook_on_blocks(
            module,
            single,
            spread,
            weights_map,
            offload_buffers,
            module_name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )
        return
    if module_name in execution_device:
        if offload.get(module_name, False):
            attach_align_device_hook(
                module,
                execution_device[module_name],
                True,
                weights_map,
                offload_buffers,
                module_name,
                skip_keys,
                preload_module_classes,
                tied_params_map,
            )
            if not hasattr(module, "_hf_hook"):
                add_hook_to_module(
                    module,
                    AlignDevicesHook(
                        execution_device[module_name], io_same_device=module_name == "", skip_keys=skip_keys
                    ),
                )
            attach_execution_device_hook(module, execution_device[module_name], skip_keys, preload_module_classes)
        else:
            hook = AlignDevicesHook(
                execution_device[module_name],
                offload_buffers=offload_buffers,
                io_same_device=module_name == "",
                place_submodules=True,
                skip_keys=skip_keys,
            )
            add_hook_to_module(module, hook)
            attach_execution_device_hook(module, execution_device[module_name], skip_keys, preload_module_classes)
    elif module_name == "":
        first = execution_device.get("", next(iter(execution_device.values())))
        add_hook_to_module(module, AlignDevicesHook(first, io_same_device=True, skip_keys=skip_keys))
    for name, child in module.named_children():
        child_name = f"{module_name}.{name}" if module_name else name
        attach_align_device_hook_on_blocks(
            child,
            execution_device,
            offload,
            weights_map,
            offload_buffers,
            child_name,
            skip_keys,
            preload_module_classes,
            tied_params_map,
        )


class CpuOffload(ModelHook):
    """Keep a whole model on the CPU until its forward; the model before it goes back then."""

    def __init__(self, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = execution_device if execution_device is not None else torch.device("cpu")

    def init_hook(self, module: nn.Module) -> nn.Module:
        """To the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """To the device, after the model before went back."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """Lets the user send a model back to the CPU."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Back to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off."""
        remove_hook_from_module(self.model)


class LayerwiseCastingHook(ModelHook):
    """Weights are stored in a small type and computed with in another."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Store."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Compute."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Store again."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output
