"""Open a model folder that may be larger than memory: plan its device map, load what stays, stream the rest.

Folders of known families become our `Transformer`, whose blocks are assembled from the tensors of the files while they
are streamed; the embedding, the last norm and the output projection always stay on the device. Quantised folders are
packed once for our kernels (`packed_folder.py`) and stay packed in every tier.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.offload.disk.direct_io import STAGED_BYTES, THREADS, Transfer
from piledriver.engine.offload.disk.extents import Extent, safetensors_extents
from piledriver.engine.offload.disk.reader import DirectReader
from piledriver.engine.offload.freed_memory import return_freed_memory
from piledriver.engine.offload.stream.depth import window_bytes
from piledriver.engine.offload.stream.model_stream import ModelStream, StreamedGroup
from piledriver.engine.offload.stream.weight_block import Assembled, Source, read_extents
from piledriver.engine.offload.tier import Tier, tier_of
from piledriver.models import Transformer
from piledriver.models.interchange import read_folder_config, read_generation, stored_parts
from piledriver.plan.placement.by_time import DeviceMap, LinkRates, place_by_time, rates_here
from piledriver.plan.placement.room import inference_room
from piledriver.serve.placement.load_checkpoint import prefix_in
from piledriver.serve.placement.maps.sizes import get_max_memory
from piledriver.serve.placement.packed_folder import pack_folder

# Of the probe of a disk: the first reads allocate buffers and start threads.
_WARM_UP_BYTES, _PROBED_BYTES = 16 << 20, 32 << 20
_DEEPEST = 4
_WINDOW = 2.0
"""Memory of a streamed block in its own bytes: the parts that it is assembled from are beside it."""
# Of the memory that the process may take, what is left to the interpreter, and to allocators, of which some reserve
# 32 MiB for each thread that allocates.
_LEFT_ALONE, _LEFT_SHARE = 56 << 20, 0.1
_STACK_BYTES = 8 << 20
"""Of a thread, unless `threading.stack_size` says."""


@dataclass(frozen=True)
class TieredModel:
    """A model on its tiers, with the plan that placed it."""

    model: Transformer
    plan: DeviceMap
    rates: LinkRates
    stream: ModelStream | None
    """None if everything fits the device."""


def open_tiered(
    folder: str | os.PathLike[str],
    *,
    batch: int = 1,
    length: int = 2048,
    max_memory: Mapping[Any, Any] | None = None,
    dtype: torch.dtype | None = None,
    scratch: str | os.PathLike[str] | None = None,
) -> TieredModel:
    """Return the model of a folder, placed for `batch` sequences of `length` tokens.

    `max_memory` gives bytes by device (0, "cpu"); by default what is free, within the limits of the process. The
    weights of a quantised folder are packed into a file without a name in `scratch`, by default the folder itself, or
    that of temporary files where it cannot be written.
    """
    return_freed_memory()
    config, theirs = read_folder_config(folder)
    with torch.device("meta"):
        model = Transformer(config)
    length = min(length, config.max_positions)
    if theirs.get("quantization_config"):
        packed = pack_folder(model, folder, theirs, dtype=dtype, scratch=scratch)
        sources = {name: Assembled((extent,), _first) for name, extent in packed.extents.items()}
        model.requires_grad_(False).eval()
        room = packed.room(batch, length)
    else:
        sources = _sources(folder, config, theirs)
        stored = next(iter(sources.values())).parts[0].dtype
        model.to(dtype or stored).requires_grad_(False).eval()
        room = None
    # Before memory is counted, because measuring takes some that allocators keep.
    rates = replace(rates_here(), disk=measure_read_rate(sources))
    room = room or inference_room(model, batch, length)
    memory = get_max_memory(dict(max_memory) if max_memory is not None else None)
    if max_memory is None and "cpu" in memory:
        # Threads read, and one assembles.
        stacks = (THREADS + 1) * (threading.stack_size() or _STACK_BYTES)
        left = _LEFT_ALONE + stacks + THREADS * STAGED_BYTES
        memory["cpu"] = max(int(memory["cpu"] * (1 - _LEFT_SHARE)) - left, 0)
    plan = place_by_time(model, memory, batch=batch, length=length, rates=rates, window=_WINDOW, room=room)
    stream = place_tiered(model, sources, plan.places, spare=plan.spare, depth=plan.depth)
    model.source_config, model.generation = theirs, read_generation(folder, theirs)
    if stream is not None:
        stream.stream.expected_rates = {Tier.DISK: rates.disk}
    return TieredModel(model, plan, rates, stream)


def place_tiered(
    model: Transformer, sources: Mapping[str, Assembled], device_map: Mapping[str, Any], *, spare: int, depth: int = 1
) -> ModelStream | None:
    """Load the weights of a meta model to the devices of a map and stream the other blocks; return the stream.

    `depth` blocks (0 or 1) are fetched ahead, and more only into `spare` bytes.
    """
    tensors = dict(model.named_parameters()) | {name: one for name, one in model.named_buffers() if name in sources}
    places = {name: device_map[prefix_in(name, device_map) or ""] for name in tensors}
    accelerators = [place for place in device_map.values() if place not in ("cpu", "disk")]
    main: Any = accelerators[0] if accelerators else "cpu"
    device = torch.device("cuda", main) if isinstance(main, int) else torch.device(main)
    streamed = {name for name, place in places.items() if tier_of(place, device) is not Tier.DEVICE}
    staying = {name: sources[name] for name in tensors if name not in streamed}
    for name, value in _read_ahead(staying):
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        made = value.to(places[name], tensors[name].dtype).contiguous()
        if leaf in module._buffers:
            module._buffers[leaf] = made
        else:
            module._parameters[leaf] = nn.Parameter(made, requires_grad=False)
    for name, module in model.named_modules():
        tables = [one for one in module._buffers if module._buffers[one] is not None and f"{name}.{one}" not in sources]
        if tables and not module._parameters:
            module.to_empty(device=device, recurse=False)  # a table is rebuilt when its module moves
    groups = [
        StreamedGroup(f"blocks.{key}", block, whole=True)
        for key, block in model.blocks.items()
        if any(name.startswith(f"blocks.{key}.") for name in streamed)
    ]
    if not groups:
        return None

    def source_of(name: str, parameter: Tensor) -> Source | None:
        if name not in streamed:
            return None
        if places[name] == "disk":
            return _cast(sources[name], parameter.dtype)
        return _load(sources[name], parameter)

    sizes = [int(_WINDOW * sum(weight.nbytes for *_, weight in group.weights(buffers=False))) for group in groups]
    return ModelStream(groups, source_of, device, deepest=_deepest(sizes, spare) if depth else 0)


def _deepest(sizes: list[int], spare: int) -> int:
    """Return how many blocks ahead there is memory for, where that of one is counted already."""
    within = [d for d in range(2, _DEEPEST + 1) if window_bytes(sizes, d) - window_bytes(sizes, 1) <= spare]
    return max(within, default=1)


def measure_read_rate(sources: Mapping[str, Assembled]) -> float:
    """Return bytes per second of direct reads of a model's own files, over a few of its weights."""
    warm: list[Extent] = []
    probed: list[Extent] = []
    for part in (part for source in reversed(list(sources.values())) for part in source.parts):
        if part.nbytes <= _WARM_UP_BYTES:
            (warm if sum(one.nbytes for one in warm) < _WARM_UP_BYTES else probed).append(part)
        if sum(one.nbytes for one in probed) >= _PROBED_BYTES:
            break
    with DirectReader(reads_cached=False) as reader:
        for chosen in (warm, probed or warm):
            targets = [torch.zeros(extent.shape, dtype=extent.dtype) for extent in chosen]
            reading = reader.read(list(zip(chosen, targets, strict=True)))
            reading.wait()
            del targets
    return reading.nbytes / max(reading.seconds, 1e-6)


def _sources(folder: str | os.PathLike[str], config: Any, theirs: Mapping[str, Any]) -> dict[str, Assembled]:
    files: dict[str, dict[str, Extent]] = {}
    found: dict[str, Assembled] = {}
    for name, make, parts in stored_parts(folder, config, theirs):
        for file, _ in parts:
            if file not in files:
                files[file] = safetensors_extents(file)
        found[name] = Assembled(tuple(files[file][stored] for file, stored in parts), make or _first)
    return found


def _read_ahead(sources: Mapping[str, Assembled]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights in host memory, one read ahead of its use."""
    with DirectReader() as reader:
        ahead: deque[tuple[str, list[Tensor], Transfer]] = deque()
        for name, source in sources.items():
            parts = [torch.empty(part.shape, dtype=part.dtype) for part in source.parts]
            ahead.append((name, parts, reader.read(list(zip(source.parts, parts, strict=True)))))
            while len(ahead) > 1:
                yield _finish(sources, *ahead.popleft())
        while ahead:
            yield _finish(sources, *ahead.popleft())


def _finish(sources: Mapping[str, Assembled], name: str, parts: list[Tensor], reading: Transfer) -> tuple[str, Tensor]:
    reading.wait()
    return name, sources[name].make(parts)


def _load(source: Assembled, parameter: Tensor) -> Tensor:
    return source.make(read_extents(source.parts)).to(parameter.dtype).contiguous()


def _first(parts: list[Tensor]) -> Tensor:
    return parts[0]


def _cast(source: Assembled, dtype: torch.dtype) -> Source:
    if all(part.dtype == dtype for part in source.parts):
        return source.parts[0] if source.make is _first else source
    return Assembled(source.parts, lambda parts: source.make(parts).to(dtype))
