"""Publish a checkpoint of a run as a Hugging Face folder: weights under their names, config and tokenizer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from piledriver.checkpoint import folders
from piledriver.checkpoint.formats.open import open_model
from piledriver.checkpoint.header import verified
from piledriver.checkpoint.state_tree import mapping_items, tensor_keys
from piledriver.checkpoint.tensor_index import read_tensor
from piledriver.core import storage
from piledriver.core.byte_size import parse_size
from piledriver.core.config import load_config
from piledriver.core.errors import UsageError
from piledriver.models import Transformer
from piledriver.models.interchange import save_folder
from piledriver.train.config import TrainConfig
from piledriver.train.pretrained import describe_source
from piledriver.train.resume import CHECKPOINTS, CONFIG, shape_of
from piledriver.train.save import publish_tokenizer, why_not_published
from piledriver.train.text import TOKENS, tokens_folder


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"dtype {name} is not a floating-point type", fix="use bfloat16, float16 or float32")
    return found


def run_of(checkpoint: storage.Location) -> Path | None:
    """Return the folder of the `piledriver train` run that a checkpoint belongs to; None if it belongs to no run."""
    path = Path(checkpoint).resolve()
    for folder in (path, *path.parents[:2]):
        if (folder / CONFIG).is_file() and (folder / CHECKPOINTS).is_dir():
            return folder
    return None


def publish_checkpoint(
    run: Path,
    checkpoint: storage.Location,
    out: storage.Location,
    *,
    max_shard_size: int | str = "5GB",
    dtype: str | None = None,
) -> list[Path]:
    """Write a checkpoint of a run as `model/` of a finished run is written; return the files, none if it cannot be.

    A model that no family of `transformers` can express, such as one with muP, is not written.
    """
    config = load_config(TrainConfig, run / CONFIG)
    shape = shape_of(config)
    if why_not_published(shape) is not None:
        return []
    opened = open_model(verified(folders.resolve_checkpoint(checkpoint)))
    keys = {
        name: tensor_keys(found)[0]
        for name, found in mapping_items(opened.shared["models"][0])
        if isinstance(found, dict) and found.get("$") == "tensor"
    }

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, key in keys.items():
            yield name, read_tensor(opened.index, key)

    stored = opened.index[next(iter(keys.values()))].dtype
    with torch.device("meta"):
        model = Transformer(shape).to(_dtype(dtype) if dtype is not None else stored)
    describe_source(model, config)
    places = (tokens_folder(config), run / TOKENS)
    tokens = next((place for place in places if os.path.isdir(place)), None)
    storage.make_folder(out)
    extra: dict[str, Any] = {} if tokens is None else dict(publish_tokenizer(config, tokens, out))
    save_folder(model, out, max_shard_bytes=parse_size(max_shard_size), extra=extra, weights=weights())
    return sorted(Path(out).iterdir())
