"""Stream the offloaded weights of a model: find their sources, attach the stream, place what is not streamed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.core.errors import CorruptFileError, MissingFileError
from piledriver.engine.offload.disk.extents import Extent, safetensors_extents
from piledriver.engine.offload.stream.model_stream import ModelStream, StreamedGroup, groups_in
from piledriver.engine.offload.stream.weight_block import Assembled, Source
from piledriver.serve.placement.align_devices import AlignDevicesHook
from piledriver.serve.placement.errors import PlacementError
from piledriver.serve.placement.hooks import SequentialHook, add_hook_to_module
from piledriver.serve.placement.stream_hook import StreamHook
from piledriver.serve.placement.tensors import set_module_tensor_to_device
from piledriver.serve.placement.weight_files import OffloadedWeightsLoader, PrefixedDataset

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class Sources:
    """Where each offloaded weight comes from: tensors in host memory, or extents of files."""

    def __init__(self, weights: Mapping[str, Any], tied: list[list[str]] | None = None) -> None:
        """Take weights by name; a tied weight may be stored under any of its names."""
        self.weights = weights
        self._aliases = {name: group for group in tied or () for name in group}
        self._files: dict[str, dict[str, Extent]] = {}

    def of(self, name: str) -> Source:
        """Return the source of a weight. A tensor in host memory is given up, so that it is not held twice."""
        stored = next((one for one in (name, *self._aliases.get(name, ())) if one in self.weights), None)
        if stored is None:
            raise PlacementError(
                f"there is no weight {name} among the offloaded ones",
                fix="give the state dict, or the offload folder, of this model",
            )
        if not isinstance(self.weights, OffloadedWeightsLoader):
            found: Tensor = self.weights[stored]
            return found.detach().to("cpu")
        if stored in self.weights.state_dict:
            kept = self.weights.state_dict
            return (kept[stored] if name in self._aliases else kept.pop(stored)).detach().to("cpu")
        return self._extent(stored, self.weights.index[stored])

    def _extent(self, name: str, info: Mapping[str, Any]) -> Source:
        wanted = info.get("dtype")
        dtype = getattr(torch, str(wanted).removeprefix("torch.")) if wanted is not None else None
        file = info.get("safetensors_file")
        if file is None:
            assert isinstance(self.weights, OffloadedWeightsLoader)
            assert dtype is not None
            found = Extent(os.path.join(self.weights.save_folder, f"{name}.dat"), 0, dtype, tuple(info["shape"]))
            _check(found)
            return found
        if file not in self._files:
            self._files[file] = safetensors_extents(file)
        stored = info.get("weight_name", name)
        if stored not in self._files[file]:
            raise CorruptFileError(f"{file} holds no tensor {stored}", fix="download or save the checkpoint again")
        found = self._files[file][stored]
        if dtype is None or dtype == found.dtype:
            return found
        return Assembled((found,), lambda parts: parts[0].to(dtype))


def _check(extent: Extent) -> None:
    if not os.path.isfile(extent.path):
        raise MissingFileError(extent.path, fix="offload the model again: the folder has lost a weight")
    size = os.path.getsize(extent.path)
    if size < extent.nbytes:
        raise CorruptFileError(
            f"{extent.path} is truncated: it has {size:,} of {extent.nbytes:,} bytes", fix="offload the model again"
        )


def stream_weights(
    model: nn.Module,
    device: Any,
    sources: Sources,
    is_offloaded: Callable[[str], bool] = lambda name: True,
    *,
    groups: list[StreamedGroup] | None = None,
    offload_buffers: bool = False,
    skip_keys: Any = None,
    preload_module_classes: list[str] | None = None,
) -> ModelStream:
    """Stream the offloaded weights of a model to a device and give their modules an `_hf_hook`; return the stream.

    Tensors of other libraries' classes are copied as a whole before their module runs, by an `AlignDevicesHook`.
    """
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    groups = groups_in(model, model, "", preload_module_classes or ()) if groups is None else groups
    plain: list[StreamedGroup] = []
    for group in groups:
        found = [one for one in group.weights(offload_buffers) if is_offloaded(one[0])]
        if all(type(tensor) in _PLAIN and type(tensor.data) is Tensor for *_, tensor in found):
            plain.append(group)
        else:
            _attach_whole(found, place, sources, skip_keys)
    devices: dict[int, dict[str, torch.device]] = {}
    resident = _resident_parameters(model, is_offloaded, place)

    def source_of(name: str, tensor: Tensor) -> Source | None:
        return _like(sources.of(name), tensor) if is_offloaded(name) and id(tensor) not in resident else None

    for group in plain:
        for _, owner, leaf, tensor in group.weights(offload_buffers):
            devices.setdefault(id(owner), {})[leaf] = tensor.device
    stream = ModelStream(plain, source_of, place, buffers=offload_buffers, skip_keys=skip_keys)
    for number, block in enumerate(stream.blocks):
        for owner in dict.fromkeys(owner for tensor in block.tensors for owner, _ in tensor.owners):
            held: Any = owner
            hook = StreamHook(stream, number, owner, devices[id(owner)])
            held._hf_hook = SequentialHook(held._hf_hook, hook) if hasattr(owner, "_hf_hook") else hook
            _place_rest(owner, place)
    return stream


def _like(source: Source, tensor: Tensor) -> Source:
    """Return a source in the dtype of the model's tensor; codes of quantised layers are never cast."""
    dtype = tensor.dtype
    if isinstance(source, Assembled) or source.dtype == dtype or not source.dtype.is_floating_point:
        return source
    return source.to(dtype) if isinstance(source, Tensor) else Assembled((source,), lambda parts: parts[0].to(dtype))


def _resident_parameters(model: nn.Module, is_offloaded: Callable[[str], bool], place: torch.device) -> set[int]:
    """Return the parameters that a name which is not offloaded keeps on the device: those tied to it use that copy."""
    named = model.named_parameters(remove_duplicate=False)
    return {id(one) for name, one in named if not is_offloaded(name) and one.device == place}


def _place_rest(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module that are not streamed to the device that it runs on."""
    for name, buffer in module._buffers.items():
        if buffer is not None and not buffer.is_meta:
            module._buffers[name] = buffer.to(device)


def _attach_whole(
    found: list[tuple[str, nn.Module, str, Tensor]], device: torch.device, sources: Sources, skip_keys: Any
) -> None:
    for owner in dict.fromkeys(owner for _, owner, _, _ in found):
        name = next(full.removesuffix(leaf) for full, one, leaf, _ in found if one is owner)
        hook = AlignDevicesHook(
            device, offload=True, weights_map=PrefixedDataset(sources.weights, name), skip_keys=skip_keys
        )
        add_hook_to_module(owner, hook, append=True)


def place_modules(model: nn.Module, devices: Mapping[str, Any], device_of: Callable[[str], Any]) -> None:
    """Move the modules of `devices` to their devices, then every other tensor to its own, where there is one.

    Modules move as a whole where they can: some rebuild tables when they move. Tied parameters stay one.
    """
    modules = dict(model.named_modules())
    for name, device in devices.items():
        module = modules.get(name)
        if module is not None and not any(one.is_meta for one in (*module.parameters(), *module.buffers())):
            module.to(device)
    moved: dict[int, Any] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            device = device_of(f"{path}.{name}".lstrip("."))
            if parameter is None or parameter.is_meta or device is None:
                continue
            if id(parameter) in moved:
                module._parameters[name] = moved[id(parameter)]
                continue
            set_module_tensor_to_device(module, name, device)
            moved[id(parameter)] = module._parameters[name]
        for name, buffer in list(module._buffers.items()):
            device = device_of(f"{path}.{name}".lstrip("."))
            if buffer is not None and not buffer.is_meta and device is not None:
                module._buffers[name] = buffer.to(device)
