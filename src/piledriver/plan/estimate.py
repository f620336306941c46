"""Accelerate's `estimate-memory`: bytes of a model's weights by dtype, and of training with Adam."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from piledriver.plan.blocks.parameters import parts_of
from piledriver.plan.errors import PlanError
from piledriver.plan.model_config import config_of

DTYPES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5}
"""Bytes of one weight."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of a model in one dtype."""

    dtype: str
    largest_layer: float
    total: float
    training: float | None
    """Weights, gradients and two moments in this dtype, as Accelerate counts; None where it cannot be trained."""


def estimate_memory(model: str, dtypes: Sequence[str] = ("float32", "float16", "int8", "int4")) -> list[MemoryEstimate]:
    """Return an estimate for each dtype. `model` is a preset or a folder with a config.json.

    >>> [round(one.total / 2**20) for one in estimate_memory("gpt2", ["float32", "int8"])]
    [475, 119]
    """
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise PlanError(f"dtype {unknown[0]!r} is unknown", fix=f"use {', '.join(DTYPES)}")
    largest, total = _counts(model)
    return [
        MemoryEstimate(
            dtype=name,
            largest_layer=largest * DTYPES[name],
            total=total * DTYPES[name],
            training=4 * total * DTYPES[name] if DTYPES[name] >= 2 else None,
        )
        for name in dtypes
    ]


def _counts(model: str) -> tuple[float, float]:
    """Return the parameters of the largest layer (a block, or an embedding) and of the model."""
    from piledriver.models.interchange.errors import InterchangeError

    try:
        config, _ = config_of(model)
    except InterchangeError:
        return _foreign_counts(model)
    parts = parts_of(config)
    layers = [sum(math.prod(one.shape) for one in parts.block), *(math.prod(one.shape) for one in parts.embedding)]
    return float(max(layers)), float(parts.count)


def _foreign_counts(folder: str) -> tuple[float, float]:
    """Count a family that is not ours: transformers builds it on the meta device, without its weights."""
    import torch

    from piledriver.core.lazy import import_optional

    if not os.path.isdir(folder):
        raise PlanError(f"{folder!r} is neither a preset nor a folder", fix="download the model, and name its folder")
    transformers = import_optional("transformers", extra="evaluate", purpose=f"the model in {folder}")
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        made = transformers.AutoModel.from_config(config)
    from piledriver.engine.blocks import blocks_of

    blocks = [sum(p.numel() for p in block.parameters()) for block in blocks_of(made).values()]
    tables = [module.weight.numel() for module in made.modules() if isinstance(module, torch.nn.Embedding)]
    return float(max([*blocks, *tables, 1])), float(sum(p.numel() for p in made.parameters()))
