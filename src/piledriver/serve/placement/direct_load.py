"""Load safetensors files straight to their tiers: device or host memory by direct reads, disk by reference.

Beside the weights themselves, host memory holds the reader's staging buffers, and the tensors that change their dtype
a few at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.offload.disk.direct_io import Transfer
from piledriver.engine.offload.disk.extents import Extent, safetensors_extents
from piledriver.engine.offload.disk.host_buffer import PAGE_BYTES
from piledriver.engine.offload.disk.reader import DirectReader
from piledriver.engine.offload.pinned import page_aligned_empty
from piledriver.serve.placement.errors import PlacementError
from piledriver.serve.placement.tensors import set_module_tensor_to_device

_BATCH_BYTES = 128 << 20
_OWN_PAGES = 4 << 20


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
        readings = [_read_in_place(reader, streams, *names[name], extent, to) for name, extent, to in as_stored]
        for name, value, to in _read_converted(reader, converted):
            owner, leaf = names[name]
            set_module_tensor_to_device(owner, leaf, to, value=value, dtype=dtype)
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
    made = _empty(extent, device)
    if leaf in owner._buffers:
        owner._buffers[leaf] = made
    else:
        held: Any = owner._parameters[leaf]
        trains = held.requires_grad and made.is_floating_point()
        owner._parameters[leaf] = nn.Parameter(made, requires_grad=trains)
    if made.is_cuda and made.device not in streams:
        streams[made.device] = torch.cuda.Stream(made.device)  # type: ignore[no-untyped-call]
        # The memory may still be in use by what it held before.
        streams[made.device].wait_stream(torch.cuda.current_stream(made.device))
    return reader.read([(extent, made)], streams.get(made.device))


def _empty(extent: Extent, device: Any) -> Tensor:
    lead = extent.offset % PAGE_BYTES
    if device == "cpu" and extent.nbytes >= _OWN_PAGES and lead % extent.dtype.itemsize == 0:
        # On huge pages where the system has them: first touches of small pages cost as much as the read. The first
        # element is as far from a page's start as in the file, so that all whole pages are read in place.
        memory = page_aligned_empty(torch.Size((lead + extent.nbytes,)), torch.uint8)
        return memory[lead:].view(extent.dtype).view(extent.shape)
    return torch.empty(extent.shape, dtype=extent.dtype, device=device)


def _read_converted(reader: DirectReader, wanted: list[tuple[str, Extent, Any]]) -> Iterator[tuple[str, Tensor, Any]]:
    """Yield tensors as they are stored, in host memory, a batch ahead of their use."""
    batches: list[list[tuple[str, Extent, Any]]] = []
    size = _BATCH_BYTES
    for one in wanted:
        if size + one[1].nbytes > _BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(one)
        size += one[1].nbytes
    ahead: tuple[list[Tensor], Transfer] | None = None
    for number, batch in enumerate(batches):
        tensors, reading = ahead or _start(reader, batch)
        ahead = _start(reader, batches[number + 1]) if number + 1 < len(batches) else None
        reading.wait()
        for (name, _, device), tensor in zip(batch, tensors, strict=True):
            yield name, tensor, device


def _start(reader: DirectReader, batch: list[tuple[str, Extent, Any]]) -> tuple[list[Tensor], Transfer]:
    tensors = [torch.empty(extent.shape, dtype=extent.dtype) for _, extent, _ in batch]
    return tensors, reader.read([(extent, tensor) for (_, extent, _), tensor in zip(batch, tensors, strict=True)])
