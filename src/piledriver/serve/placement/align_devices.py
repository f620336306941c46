"""Run each module on its execution device; offloaded weights are there only during its forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from piledriver.runtime.collectives.nested import find_device, send_to_device
from piledriver.serve.placement.hooks import ModelHook, add_hook_to_module
from piledriver.serve.placement.tensors import named_module_tensors, set_module_tensor_to_device
from piledriver.serve.placement.weight_files import PrefixedDataset


class AlignDevicesHook(ModelHook):
    """Moves weights and inputs to the execution device before forward; with `offload`, removes the weights after it."""

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
        """Place the weights on the execution device, or replace offloaded ones by meta tensors."""
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        offloaded: set[str] = set()
        if self.offload:
            self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
            if self.weights_map is None:
                self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in self._offloaded(module)}
            for name, _ in self._offloaded(module):
                set_module_tensor_to_device(module, name, "meta")
                offloaded.add(name)
        if self.execution_device is not None:
            for name, tensor in tensors.items():
                if name not in offloaded and not (self.offload and tensor.device.type == "meta"):
                    set_module_tensor_to_device(module, name, self.execution_device)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Move the weights and the inputs to the execution device."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self.offload:
            assert self.weights_map is not None
            for name, _ in self._offloaded(module):
                set_module_tensor_to_device(module, name, self.execution_device, value=self.weights_map[name])
        if self.execution_device is None:
            return args, kwargs
        return (
            send_to_device(args, self.execution_device),
            send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys),
        )

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Remove offloaded weights; with `io_same_device`, move the output to the device of the inputs."""
        if self.offload:
            for name, _ in self._offloaded(module):
                set_module_tensor_to_device(module, name, "meta")
        if self.io_same_device and self.input_device is not None:
            output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore every tensor to the device that it had before the hook."""
        if self.offload and self.weights_map is not None:
            for name, device in self.original_devices.items():
                if device.type != "meta":
                    value = self.weights_map.get(name) if isinstance(self.weights_map, Mapping) else None
                    set_module_tensor_to_device(module, name, device, value=value)
        return module

    @contextmanager
    def aligned(self, module: nn.Module, device: Any) -> Iterator[None]:
        """Keep the module's weights on a device (default: the execution device) within the block."""
        before = self.execution_device
        self.execution_device = device if device is not None else before
        self.pre_forward(module)
        try:
            yield
        finally:
            self.post_forward(module, None)
            self.execution_device = before

    def _offloaded(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        """Return parameters, with `offload_buffers` also persistent buffers, as a list: callers replace them."""
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
    """Attach an `AlignDevicesHook` to every submodule that holds weights and has no hook yet."""
    for _, one in _walk(module, "", preload_module_classes):
        if not hasattr(one, "_hf_hook") and len(one.state_dict()) > 0:
            add_hook_to_module(one, AlignDevicesHook(execution_device, skip_keys=skip_keys))


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
    """Attach an `AlignDevicesHook` to every submodule with tensors of its own; preloaded classes get one as a whole."""
    for name, one in _walk(module, module_name, preload_module_classes):
        preloaded = type(one).__name__ in (preload_module_classes or ())
        if preloaded or any(True for _ in named_module_tensors(one)):
            hook = AlignDevicesHook(
                execution_device=execution_device,
                offload=offload,
                weights_map=None if weights_map is None else PrefixedDataset(weights_map, name and f"{name}."),
                offload_buffers=offload_buffers,
                place_submodules=preloaded,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(one, hook, append=True)


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
    """Attach hooks block by block: `execution_device` and `offload` map block names to a device and a flag."""
    blocks = next((given for given in (execution_device, offload) if isinstance(given, Mapping)), (module_name,))
    devices = execution_device if isinstance(execution_device, Mapping) else dict.fromkeys(blocks, execution_device)
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(blocks, offload)
    for name, one in _walk(module, module_name):
        is_root = name == ""
        if name not in devices:
            if is_root:
                first = next(iter(devices.values()))
                add_hook_to_module(one, AlignDevicesHook(first, io_same_device=True, skip_keys=skip_keys))
            continue
        device = devices[name]
        whole = AlignDevicesHook(device, io_same_device=is_root, skip_keys=skip_keys)
        if offloads.get(name, False):
            attach_align_device_hook(
                one,
                device,
                True,
                weights_map,
                offload_buffers,
                name,
                skip_keys,
                preload_module_classes,
                tied_params_map,
            )
            if not hasattr(one, "_hf_hook"):
                add_hook_to_module(one, whole)
        else:
            whole.offload_buffers, whole.place_submodules = offload_buffers, True
            add_hook_to_module(one, whole)
        attach_execution_device_hook(one, device, skip_keys, preload_module_classes)


def _walk(module: nn.Module, name: str, whole_classes: Sequence[str] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and everything below it with full names, but nothing inside modules of `whole_classes`."""
    yield name, module
    if type(module).__name__ not in (whole_classes or ()):
        for child_name, child in module.named_children():
            yield from _walk(child, f"{name}.{child_name}" if name else child_name, whole_classes)
