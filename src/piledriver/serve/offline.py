"""`generate`: continue prompts with a model, offline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piledriver.core import storage
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.engine import Layout
from piledriver.kernels.linear import WeightKind
from piledriver.models import Transformer
from piledriver.models.interchange import load_folder
from piledriver.models.quantised import quantise_linears
from piledriver.serve.engine import Engine
from piledriver.serve.errors import ServeError
from piledriver.serve.request import RequestOutput, SamplingParams


def generate(
    model: Transformer | storage.Location,
    prompts: Sequence[str | Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> list[RequestOutput]:
    """Continue prompts (texts, or lists of token ids) with a model or a model folder; one output for each.

    `settings` are fields of `EngineConfig`. To serve more than once, make an `Engine`.

    >>> from piledriver.models import ModelConfig
    >>> model = Transformer(ModelConfig(vocab_size=32, dim=16, layers=1, heads=2))
    >>> [output] = generate(model, [[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0))
    >>> len(output.completions[0].token_ids)
    4
    """
    if isinstance(model, Transformer):
        engine = Engine(model, tokenizer, **settings)
    else:
        engine = open_engine(model, tokenizer=tokenizer, **settings)
    return engine.generate(prompts, params)


def open_engine(
    folder: storage.Location,
    *,
    tokenizer: Tokenizer | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    quantise: WeightKind | None = None,
    layout: Layout | None = None,
    **settings: Any,
) -> Engine:
    """Return an engine for a model folder (config.json and safetensors) with its tokenizer.

    `quantise` rounds the weights of the linear layers; an int4 model gets an int8 head. With a `layout` of tp over 1
    each rank loads its shard: all ranks call this in connected processes, and those with `Engine.follows` then call
    `Engine.follow`.
    """
    place = device or torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if layout is not None and layout.tp > 1:
        if quantise is not None:
            raise ServeError("quantised weights are not sharded", fix="serve without quantise, or with tp=1")
        from piledriver.serve.execution.tensor_parallel.load import load_sharded

        shard = load_sharded(folder, layout, device=torch.device(place), dtype=dtype)
        return Engine(shard, tokenizer or open_tokenizer(folder), **settings)
    model = load_folder(folder, device=place, dtype=dtype).requires_grad_(False)
    if quantise is not None:
        quantise_linears(model, quantise, head="int8" if quantise == "int4" else quantise)
    return Engine(model, tokenizer or open_tokenizer(folder), **settings)
