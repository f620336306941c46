"""Write safetensors files in shards, one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from piledriver.core import storage
from piledriver.core.safetensors import SafetensorsWriter, TensorEntry
from piledriver.models.interchange.errors import InterchangeError
from piledriver.models.interchange.folder.files import INDEX, WHOLE


def write_tensor_files(target: Path, shards: list[list[TensorEntry]], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write the tensors of each shard, which come in any order, and an index; remove files of an earlier save."""
    names = [WHOLE]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    stale = {path.name for path in target.glob("model*.safetensors")} - set(names)
    places = {entry.name: file for file, shard in zip(names, shards, strict=True) for entry in shard}
    writers: dict[str, SafetensorsWriter] = {}
    try:
        for file, shard in zip(names, shards, strict=True):
            writers[file] = SafetensorsWriter(target / file, shard)
        missing = set(places)
        for name, tensor in tensors:
            content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            writers[places[name]].write(name, memoryview(content))  # type: ignore[arg-type]
            missing.discard(name)
        if missing:
            raise InterchangeError(f"{target}: no weights came for {min(missing)}", fix="give every parameter")
        for writer in writers.values():
            writer.close()
    except BaseException:
        for writer in writers.values():
            writer.abort()
        raise
    if len(shards) > 1:
        total = sum(entry.size for shard in shards for entry in shard)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        storage.write_text(target / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    else:
        storage.remove_file(target / INDEX)
    for name in stale:
        storage.remove_file(target / name)
