"""Save models to and load them from Hugging Face folders: safetensors shards with an index, tied weights once."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from piledriver.checkpoint import folders, parameter_names
from piledriver.checkpoint.contents import Contents
from piledriver.checkpoint.errors import CheckpointError
from piledriver.checkpoint.folder_kinds import INDEX_ENDING
from piledriver.checkpoint.formats.open import open_model
from piledriver.checkpoint.header import verified
from piledriver.checkpoint.loading.match import KeyMap, load_matching
from piledriver.checkpoint.loading.report import LoadReport
from piledriver.checkpoint.safetensors_file import write_safetensors
from piledriver.checkpoint.saving.rank_group import RankGroup
from piledriver.core.byte_size import parse_size
from piledriver.core.storage import Location, fsync_folder, write_text

_OLD = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
Fetch = Callable[[], torch.Tensor | None]
"""Copy one tensor to the host; collective if it is sharded. None on ranks that do not write."""


def save_model(
    model: nn.Module | Mapping[str, torch.Tensor],
    folder: Location,
    *,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> list[Path]:
    """Write a model as a Hugging Face folder. Collective; rank 0 writes, with one shard at a time in memory.

    A tied weight is written once, under its first name; the other names are in the metadata of the file.
    """
    ranks = RankGroup()
    try:
        state = parameter_names.model_state(model) if isinstance(model, nn.Module) else dict(model)
        state = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        tensors, aliases = untied(state)
        plan = [
            (key, value.numel() * value.dtype.itemsize, _fetcher(value, ranks.first)) for key, value in tensors.items()
        ]
        return write_shards(
            plan, local_folder(folder), max_shard_size, aliases=aliases, safe=safe_serialization, ranks=ranks
        )
    finally:
        ranks.close()


def load_model(
    model: nn.Module, path: Location, *, strict: bool = True, key_map: KeyMap | None = None, index: int = 0
) -> LoadReport:
    """Load weights from a checkpoint, an Accelerate or Hugging Face folder, a `.safetensors` or `.bin` file.

    Each rank reads only its shards. `index` selects the model of a checkpoint that holds several.
    """
    source = folders.local_path(path)
    ranks = RankGroup()
    try:
        opened = ranks.run_checked(
            "reading the weights", lambda: open_model(verified(source, part=ranks.rank, parts=ranks.size), index)
        )
        return load_matching(opened, Contents(models=[model], rng=False), ranks, strict=strict, key_map=key_map)
    finally:
        ranks.close()


def untied(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return each weight once, and the other names of tied weights: name -> kept name."""
    kept: dict[tuple[object, ...], str] = {}
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in state.items():
        first = kept.setdefault(_identity(tensor), name)
        if first == name:
            tensors[name] = tensor
        else:
            aliases[name] = first
    return tensors, aliases


def write_shards(
    plan: Iterable[tuple[str, int, Fetch]],
    folder: Path,
    max_shard_size: int | str,
    *,
    aliases: Mapping[str, str],
    safe: bool = True,
    ranks: RankGroup,
) -> list[Path]:
    """Write planned tensors to shards in a temporary folder, then move these into place, the index last."""
    plan = list(plan)
    shards = list(_shards(plan, parse_size(max_shard_size)))
    stem, ending = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    files = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.{ending}" for i in range(len(shards))]
    files = files if len(shards) > 1 else [f"{stem}.{ending}"]
    partial = folder / f".{stem}-{secrets.token_hex(4)}.partial"
    try:
        if ranks.first:
            partial.mkdir(parents=True)
        for file, shard in zip(files, shards, strict=True):
            # Gathering is collective, so all ranks fetch every tensor; only rank 0 keeps them.
            fetched = [(name, fetch()) for name, _, fetch in shard]
            held = [(name, tensor) for name, tensor in fetched if tensor is not None]

            def write(file: str = file, held: list[tuple[str, torch.Tensor]] = held) -> None:
                if ranks.first:
                    _write_one(partial / file, held, aliases, safe)

            ranks.run_checked("writing the model", write)
        ranks.run_checked(
            "committing the model", lambda: _move(partial, folder, files, shards) if ranks.first else None
        )
    finally:
        if ranks.first:
            shutil.rmtree(partial, ignore_errors=True)
    return [folder / file for file in files]


def _write_one(path: Path, tensors: list[tuple[str, torch.Tensor]], aliases: Mapping[str, str], safe: bool) -> None:
    here = {name for name, _ in tensors}
    extra = {name: kept for name, kept in aliases.items() if kept in here}
    if safe:
        write_safetensors(path, tensors, metadata=extra)
        return
    state = {name: tensor.cpu() for name, tensor in tensors}
    torch.save(state | {name: state[kept] for name, kept in extra.items()}, path)


def _move(partial: Path, folder: Path, files: list[str], shards: list[list[tuple[str, int, Fetch]]]) -> None:
    index = {
        "metadata": {"total_size": sum(size for shard in shards for _, size, _ in shard)},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name, _, _ in shard},
    }
    stale = [path for path in folder.iterdir() if _OLD.fullmatch(path.name) and path.name not in files]
    # The old index is removed first: an interrupted move leaves a folder without a model, never a mixed one.
    for path in sorted(stale, key=lambda path: not path.name.endswith(INDEX_ENDING)):
        path.unlink()
    for file in files:
        (partial / file).replace(folder / file)
    fsync_folder(folder)
    if len(files) > 1:
        listing = f"{files[0].split('-')[0]}.{files[0].rsplit('.', 1)[1]}{INDEX_ENDING}"
        write_text(folder / listing, json.dumps(index, indent=2) + "\n")


def _shards(plan: list[tuple[str, int, Fetch]], limit: int) -> Iterator[list[tuple[str, int, Fetch]]]:
    shard: list[tuple[str, int, Fetch]] = []
    size = 0
    for item in plan:
        if shard and size + item[1] > limit:
            yield shard
            shard, size = [], 0
        shard.append(item)
        size += item[1]
    yield shard


def _fetcher(tensor: torch.Tensor, keep: bool) -> Fetch:
    def fetch() -> torch.Tensor | None:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.detach().cpu() if keep else None

    return fetch


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    if isinstance(tensor, DTensor) or tensor.is_meta or not tensor.numel():
        return ("object", id(tensor))
    return ("memory", tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def local_folder(folder: Location) -> Path:
    """Create a local folder if needed, and return it."""
    path = folders.local_path(folder)
    if path.is_file():
        raise CheckpointError(f"{path} is a file, not a folder", fix="give a folder")
    path.mkdir(parents=True, exist_ok=True)
    return path
