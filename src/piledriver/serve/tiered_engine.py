"""An engine for a model folder that may be larger than the device and the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from piledriver.core import storage
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.models.codes import first_weight
from piledriver.serve.engine import Engine
from piledriver.serve.placement.tiered_model import TieredModel, open_tiered


def open_tiered_engine(
    folder: storage.Location,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    max_context: int = 2048,
    max_sequences: int = 1,
    scratch: storage.Location | None = None,
    **settings: Any,
) -> tuple[Engine, TieredModel]:
    """Return an engine whose weights come from their tiers, and the model with the plan that placed it.

    Room is kept for `max_sequences` answers of `max_context` tokens. Fused kernels and CUDA graphs hold addresses of
    weights, so a model whose blocks are streamed runs without them. `scratch` is the folder for the packed weights of a
    quantised model.
    """
    opened = open_tiered(
        folder, batch=max_sequences, length=max_context, max_memory=max_memory, dtype=dtype, scratch=scratch
    )
    resident = opened.stream is None
    # On a CPU fused operators hold packed copies of the weights, for which the map has no memory.
    fused = resident and first_weight(opened.model).device.type != "cpu"
    longest = min(max_context, opened.model.config.max_positions)
    block = int(settings.get("block_size", 16))
    chosen = {
        "cache_tokens": max_sequences * -(-longest // block) * block,
        "fused": fused,
        "cuda_graphs": resident,
        **settings,
    }
    engine = Engine(
        opened.model,
        tokenizer or open_tokenizer(folder),
        max_context=longest,
        max_sequences=max_sequences,
        **chosen,
    )
    return engine, opened
