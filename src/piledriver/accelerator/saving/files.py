"""Single files: any object, or a model's weights."""

from __future__ import annotations

import io
import logging
from typing import Any

import torch

from piledriver.accelerator.unwrap import unwrap_module
from piledriver.checkpoint import save_model
from piledriver.checkpoint.errors import cannot_save
from piledriver.core import storage

_log = logging.getLogger(__name__)


def save_object(thing: Any, target: Any, safe_serialization: bool = False) -> None:
    """Write an object with torch, or a state dict as safetensors; atomically where the target is a path."""
    if safe_serialization:
        from safetensors.torch import save as as_safetensors

        content = as_safetensors(without_shared(thing), metadata={"format": "pt"})
    else:
        buffer = io.BytesIO()
        torch.save(thing, buffer)
        content = buffer.getvalue()
    if hasattr(target, "write"):
        target.write(content)
    else:
        storage.write_bytes(target, content)


def without_shared(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict in which every tensor owns its memory; tied weights keep their first name."""
    kept: dict[str, torch.Tensor] = {}
    seen: dict[Any, str] = {}
    dropped: list[str] = []
    for name, tensor in state.items():
        key = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        if tensor.numel() and key in seen and tensor.device.type != "meta":
            dropped.append(name)
            continue
        seen[key] = name
        kept[name] = tensor.contiguous()
    if dropped:
        _log.warning("Removed shared tensor %s while saving; loading ties it to the one that is left", set(dropped))
    return kept


def save_model_files(model: Any, folder: Any, max_shard_size: int | str, safe_serialization: bool) -> None:
    """Save weights in Hugging Face's format."""
    try:
        save_model(unwrap_module(model), folder, max_shard_size=max_shard_size, safe_serialization=safe_serialization)
    except OSError as error:
        raise cannot_save(folder, error) from error
