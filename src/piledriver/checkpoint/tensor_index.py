"""Index of tensors by key: where each chunk of each tensor is stored, and reading any region of any tensor.

piledriver's own shards, Hugging Face folders and tensors in memory have the same index: keys, shapes, and chunks with
their places. torch's DCP plans which chunks a target (a plain tensor, or a rank's shard of a DTensor) needs;
`TensorIndexReader` reads them, also for `torch.distributed.checkpoint.load`.
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
class TensorChunk:
    """A rectangular part of a tensor and its place: a safetensors file, a `torch.save` inside a file, or memory."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path | None = None
    name: str = ""
    span: tuple[int, int] | None = None
    """Offset and length in the file of a `torch.save` of this chunk."""
    memory: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """A tensor with its chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[TensorChunk, ...]

    @property
    def bytes(self) -> int:
        """Return the size of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


TensorIndex = Mapping[str, IndexedTensor]


def index_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, IndexedTensor]:
    """Return the index of tensors in memory."""
    return {
        key: IndexedTensor(
            value.dtype, tuple(value.shape), (TensorChunk((0,) * value.dim(), tuple(value.shape), memory=value),)
        )
        for key, value in tensors.items()
    }


def index_safetensors(files: Iterable[Path]) -> dict[str, IndexedTensor]:
    """Return the index of safetensors files, from their headers alone."""
    from piledriver.checkpoint.safetensors_file import read_tensor_specs

    entries: dict[str, IndexedTensor] = {}
    for file in files:
        for name, (dtype, shape) in read_tensor_specs(file).items():
            entries[name] = IndexedTensor(dtype, shape, (TensorChunk((0,) * len(shape), shape, file=file, name=name),))
    return entries


def read_into(index: TensorIndex, targets: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fill each target (plain or DTensor, in place, converted to its dtype) with the tensor of its key."""
    waiting = list(targets)
    while waiting:
        # A plan has one target per key; a key with several targets (weights untied after the save) needs several plans.
        now: dict[str, Any] = {}
        later: list[tuple[str, torch.Tensor]] = []
        for key, target in waiting:
            later.append((key, target)) if key in now else now.setdefault(key, target)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = TensorIndexReader(index)
        planner.set_up_planner(now, reader.read_metadata(), True)
        reader.read_data(planner.create_local_plan(), planner).wait()
        waiting = later


def read_tensor(index: TensorIndex, key: str) -> torch.Tensor:
    """Return a whole tensor in host memory."""
    entry = index[key]
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    read_into(index, [(key, whole)])
    return whole


class TensorIndexReader(StorageReader):
    """A DCP storage reader over a tensor index. It unpickles nothing."""

    def __init__(self, index: TensorIndex) -> None:
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index as DCP metadata."""
        entries: dict[str, Any] = {}
        places: dict[MetadataIndex, TensorChunk] = {}
        for key, entry in self._index.items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
            entries[key] = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), torch.Size(entry.shape), chunks)
            places |= {MetadataIndex(key, chunk.offsets): chunk for chunk in entry.chunks}
        self._places = places
        return Metadata(state_dict_metadata=entries, storage_data=places)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every region of the plan, with one file open at a time."""
        from piledriver.checkpoint.safetensors_file import open_safetensors

        by_file: dict[Path | None, list[tuple[ReadItem, TensorChunk]]] = defaultdict(list)
        for item in plan.items:
            chunk = self._places[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
            by_file[chunk.file].append((item, chunk))
        with torch.no_grad():
            for file, items in by_file.items():
                if file is None or items[0][1].span is not None:
                    for item, chunk in items:
                        _deliver(planner, item, _load_chunk(chunk)[_region(item)])
                    continue
                with open_safetensors(file) as read:
                    for item, chunk in items:
                        entry = self._index[item.storage_index.fqn]
                        _deliver(planner, item, read(chunk.name, _region(item), entry.dtype))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: no state is kept between reads."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Take the places of the chunks from metadata, which another rank may have read."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any folder."""
        return True


def _load_chunk(chunk: TensorChunk) -> torch.Tensor:
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
            f"{item.storage_index.fqn}: {list(value.shape)} in the file, {list(target.shape)} in the index",
            fix="the file was changed after the save: load an earlier checkpoint",
        )
    target.copy_(value)
    planner.commit_tensor(item, target)


def chunk_name(key: str, offsets: tuple[int, ...], whole: bool) -> str:
    """Return the name of a chunk in its file; the chunk that is the whole tensor has the name of the tensor.

    >>> chunk_name("fc.weight", (4, 0), whole=False)
    'fc.weight@4,0'
    """
    return key if whole else f"{key}@{','.join(map(str, offsets))}"
