"""Merge the shards of a checkpoint into a Hugging Face folder, in one process and without the code of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from piledriver.checkpoint import folders
from piledriver.checkpoint.formats.huggingface import Fetch, local_folder, write_shards
from piledriver.checkpoint.formats.open import open_model
from piledriver.checkpoint.header import verified
from piledriver.checkpoint.saving.rank_group import RankGroup
from piledriver.checkpoint.state_tree import mapping_items, tensor_keys
from piledriver.checkpoint.tensor_index import TensorIndex, read_tensor
from piledriver.core.errors import UsageError
from piledriver.core.storage import Location


def merge(
    checkpoint: Location,
    folder: Location,
    *,
    model: int = 0,
    max_shard_size: int | str = "5GB",
    dtype: str | torch.dtype | None = None,
    safe_serialization: bool = True,
) -> list[Path]:
    """Write one model of a checkpoint or weights folder as Hugging Face shards, with one shard at a time in memory.

    `dtype` converts floating-point weights, for example to `bfloat16` for publishing.
    """
    wanted: Any = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if wanted is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise UsageError(f"dtype {wanted} is not a floating-point type", fix="use bfloat16, float16 or float32")
    opened = open_model(verified(folders.resolve_checkpoint(checkpoint)), model)
    first_name: dict[str, str] = {}
    aliases: dict[str, str] = {}
    plan: list[tuple[str, int, Fetch]] = []
    for name, found in mapping_items(opened.shared["models"][0]):
        for key in tensor_keys(found)[:1] if isinstance(found, dict) and found.get("$") == "tensor" else []:
            if key in first_name:
                aliases[name] = first_name[key]
                continue
            first_name[key] = name
            entry = opened.index[key]
            target = wanted if wanted is not None and entry.dtype.is_floating_point else entry.dtype
            size = entry.bytes // entry.dtype.itemsize * target.itemsize
            plan.append((name, size, _reader(opened.index, key, target)))
    return write_shards(
        plan, local_folder(folder), max_shard_size, aliases=aliases, safe=safe_serialization, ranks=RankGroup()
    )


def _reader(index: TensorIndex, key: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: read_tensor(index, key).to(dtype)
