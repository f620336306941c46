"""Where each piece of each tensor lies, and reading any region of any tensor from there.

Our own shards, Hugging Face folders and tensors already in memory are all the same kind of thing: keys, shapes, and
chunks in places. torch's DCP plans which chunks a target (a plain tensor or one rank's part of a DTensor) needs; the
`Reader` fetches them. `torch.distributed.checkpoint.load` accepts the same reader.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from piledriver.checkpoint.errors import IncompleteCheckpointError
from piledriver.core.storage import open_read


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and where its bytes are: in a safetensors file, a `torch.save` inside a file, or memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path | None = None
    name: str = ""
    span: tuple[int, int] | None = None
    memory: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """The size of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Catalog = Mapping[str, Entry]


def in_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, Entry]:
    """A catalog of tensors that were read already."""
    return {
        key: Entry(value.dtype, tuple(value.shape), (Chunk((0,) * value.dim(), tuple(value.shape), memory=value),))
        for key, value in tensors.items()
    }


def in_safetensors(files: Iterable[Path]) -> dict[str, Entry]:
    """A catalog of plain safetensors files, from their headers alone."""
    from piledriver.checkpoint.safetensors_file import read_layout

    entries: dict[str, Entry] = {}
    for file in files:
        for name, (dtype, shape) in read_layout(file).items():
            entries[name] = Entry(dtype, shape, (Chunk((0,) * len(shape), shape, file=file, name=name),))
    return entries


def read_into(catalog: Catalog, targets: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill each target (plain or DTensor, in place, converted to its dtype) with the tensor of its key."""
    waiting = list(targets)
    while waiting:
        # A plan has one target per key; a key with several targets (weights untied since) takes several plans.
        now: dict[str, Any] = {}
        later: list[tuple[str, torch.Tensor]] = []
        for key, target in waiting:
            later.append((key, target)) if key in now else now.setdefault(key, target)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = Reader(catalog)
        planner.set_up_planner(now, reader.read_metadata(), True)
        reader.read_data(planner.create_local_plan(), planner).wait()
        waiting = later


def read_whole(catalog: Catalog, key: str) -> torch.Tensor:
    """One whole tensor, in host memory."""
    entry = catalog[key]
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    read_into(catalog, [(key, whole)])
    return whole


class Reader(StorageReader):
    """A DCP storage reader over a catalog. Nothing that it reads is ever unpickled."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The catalog in DCP's own terms."""
        entries: dict[str, Any] = {}
        places: dict[MetadataIndex, Chunk] = {}
        for key, entry in self._catalog.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
            entries[key] = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks)
            places |= {MetadataIndex(key, chunk.offsets): chunk for chunk in entry.chunks}
        self._places = places
        return Metadata(state_dict_metadata=entries, storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch every region of the plan, one open file at a time."""
        from piledriver.checkpoint.safetensors_file import open_file

        by_file: dict[Path | None, list[tuple[ReadItem, Chunk]]] = defaultdict(list)
        for item in plan.items:
            chunk = self._places[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
            by_file[chunk.file].append((item, chunk))
        with torch.no_grad():
            for file, items in by_file.items():
                if file is None or items[0][1].span is not None:
                    for item, chunk in items:
                        _deliver(planner, item, _in_memory(chunk)[_region(item)])
                    continue
                with open_file(file) as read:
                    for item, chunk in items:
                        entry = self._catalog[item.storage_index.fqn]
                        _deliver(planner, item, read(chunk.name, _region(item), entry.dtype))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between reads."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """The places are known from `read_metadata`; a rank that was given the metadata takes them from there."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any folder may be asked for; what is in it decides."""
        return True


def _in_memory(chunk: Chunk) -> torch.Tensor:
    if chunk.memory is not None:
        return chunk.memory
    assert chunk.file is not None
    assert chunk.span is not None
    start, length = chunk.span
    with open_read(chunk.file) as file:
        file.seek(start)
        found = torch.load(io.BytesIO(file.read(length)), map_location="cpu", weights_only=True)
    assert isinstance(found, torch.Tensor)
    return found


def _region(item: ReadItem) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(item.storage_offsets, item.lengths, strict=True))


def _deliver(planner: LoadPlanner, item: ReadItem, value: torch.Tensor) -> None:
    target = planner.resolve_tensor(item).detach()
    if target.shape != value.shape:
        raise IncompleteCheckpointError(
            f"{item.storage_index.fqn} has the region {list(value.shape)} where {list(target.shape)} was written",
            fix="the file was changed after it was saved: load an earlier checkpoint",
        )
    target.copy_(value)
    planner.commit_tensor(item, target)


def name_in_file(key: str, offsets: tuple[int, ...], whole: bool) -> str:
    """The name of a box inside its file: the key itself where the box is the whole tensor.

    >>> name_in_file("fc.weight", (4, 0), whole=False)
    'fc.weight@4,0'
    """
    return key if whole else f"{key}@{','.join(map(str, offsets))}"
