"""Load safetensors files straight to their tiers: device or host memory by direct reads, disk by reference.

Beside the weights themselves, host memory holds the reader's staging buffers, and the tensors that change their dtype
a few at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.offload.disk.coalesced_read import read_coalesced
from piledriver.engine.offload.disk.direct_io import Transfer
from piledriver.engine.offload.disk.extents import Extent, safetensors_extents
from piledriver.engine.offload.disk.reader import DirectReader
from piledriver.serve.placement.errors import PlacementError
from piledriver.serve.placement.tensors import set_module_tensor_to_device


def find_extents(files: Iterable[Path]) -> dict[str, Extent]:
    """Return the extents of all tensors of safetensors files; reading the headers also finds truncated files."""
    found: dict[str, Extent] = {}
    for file in files:
        found |= safetensors_extents(os.path.abspath(file))
    return found


def offload_entry(name: str, extent: Extent) -> dict[str, Any]:
    """Return the entry of an offload index that refers to a tensor of a safetensors file."""
    return {
        "safetensors_file": extent.path,
        "weight_name": name,
        "dtype": str(extent.dtype).removeprefix("torch."),
        "shape": list(extent.shape),
    }


def load_extents(
    model: nn.Module, extents: Mapping[str, Extent], device_of: Callable[[str], Any], dtype: torch.dtype | None = None
) -> None:
    """Read tensors into a model, each to its device; floating-point ones in `dtype` or the dtype of the model's own."""
    names = _tensors(model)
    as_stored: list[tuple[str, Extent, Any]] = []
    converted: list[tuple[str, Extent, Any]] = []
    for name, extent in extents.items():
        owner, leaf = names[name]
        held = owner._buffers[leaf] if leaf in owner._buffers else owner._parameters[leaf]
        assert held is not None
        if extent.shape != tuple(held.shape):
            raise PlacementError(
                f"{extent.path}: {name} has shape {list(extent.shape)}, the model's has {list(held.shape)}",
                fix="load the checkpoint of this model",
            )
        wanted = (dtype or held.dtype) if extent.dtype.is_floating_point else extent.dtype
        (as_stored if wanted == extent.dtype else converted).append((name, extent, device_of(name)))
    with DirectReader() as reader:
        streams: dict[torch.device, Any] = {}
        on_host = {name: extent for name, extent, to in as_stored if str(to) == "cpu"}
        readings = [
            _read_in_place(reader, streams, *names[name], extent, to)
            for name, extent, to in as_stored
            if name not in on_host
        ]
        for name, value in read_coalesced(reader, on_host):
            _put(*names[name], value)
        devices = {name: to for name, _, to in converted}
        for name, value in read_coalesced(reader, {name: extent for name, extent, _ in converted}, ahead=1):
            owner, leaf = names[name]
            set_module_tensor_to_device(owner, leaf, devices[name], value=value, dtype=dtype)
        for reading in readings:
            reading.wait()
        for stream in streams.values():
            stream.synchronize()


def _tensors(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    return {
        f"{path}.{leaf}".lstrip("."): (module, leaf)
        for path, module in model.named_modules(remove_duplicate=False)
        for leaf in (*module._parameters, *module._buffers)
    }


def _read_in_place(
    reader: DirectReader, streams: dict[torch.device, Any], owner: nn.Module, leaf: str, extent: Extent, device: Any
) -> Transfer:
    """Replace a tensor by an empty one on its device and start reading into it."""
    made = torch.empty(extent.shape, dtype=extent.dtype, device=device)
    _put(owner, leaf, made)
    if made.is_cuda and made.device not in streams:
        streams[made.device] = torch.cuda.Stream(made.device)  # type: ignore[no-untyped-call]
        # The memory may still be in use by what it held before.
        streams[made.device].wait_stream(torch.cuda.current_stream(made.device))
    return reader.read([(extent, made)], streams.get(made.device))


def _put(owner: nn.Module, leaf: str, value: Tensor) -> None:
    if leaf in owner._buffers:
        owner._buffers[leaf] = value
    else:
        held: Any = owner._parameters[leaf]
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=held.requires_grad and value.is_floating_point())
