"""From the sharded format to what others read, in one process and without the model's code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from piledriver.checkpoint import folders
from piledriver.checkpoint.formats.huggingface import Fetch, local_folder, weights_of, write_shards
from piledriver.checkpoint.saving.group import Ranks
from piledriver.checkpoint.tensor_index import Catalog, read_whole
from piledriver.checkpoint.tree import pairs, tensor_keys
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
    """Write one model of a checkpoint (or of any weights folder) as Hugging Face shards; one shard in memory at a time.

    `dtype` converts floating-point weights, such as `bfloat16` for publishing.
    """
    wanted: Any = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if wanted is not None and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise UsageError(f"dtype {wanted} is not a floating-point type", fix="use bfloat16, float16 or float32")
    snapshot = weights_of(folders.meant(checkpoint), model)
    first_name: dict[str, str] = {}
    aliases: dict[str, str] = {}
    plan: list[tuple[str, int, Fetch]] = []
    for name, found in pairs(snapshot.shared["models"][0]):
        for key in tensor_keys(found)[:1] if isinstance(found, dict) and found.get("$") == "tensor" else []:
            if key in first_name:
                aliases[name] = first_name[key]
                continue
            first_name[key] = name
            entry = snapshot.catalog[key]
            target = wanted if wanted is not None and entry.dtype.is_floating_point else entry.dtype
            size = entry.bytes // entry.dtype.itemsize * target.itemsize
            plan.append((name, size, _reader(snapshot.catalog, key, target)))
    return write_shards(
        plan, local_folder(folder), max_shard_size, aliases=aliases, safe=safe_serialization, ranks=Ranks()
    )


def _reader(catalog: Catalog, key: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    return lambda: read_whole(catalog, key).to(dtype)
