"""`generate`: continue prompts with a model, offline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from piledriver.core import storage
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.engine import Layout
from piledriver.kernels.compile_ahead import start_compiler
from piledriver.kernels.linear import WeightKind
from piledriver.models import Transformer
from piledriver.models.codes import QuantisedCodes, first_weight
from piledriver.models.interchange import allocate_folder, load_folder, load_weights, read_folder_config
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

    `quantise` rounds the weights of the linear layers and the output projection (to int8 for int4). With a `layout` of
    tp over 1 each rank loads its shard: all ranks call this in connected processes, and those with `Engine.follows`
    then call `Engine.follow`.
    """
    place = torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if place.type == "cuda":
        start_compiler()
    if layout is not None and layout.tp > 1:
        if quantise is not None:
            raise ServeError("quantised weights are not sharded", fix="serve without quantise, or with tp=1")
        from piledriver.serve.execution.tensor_parallel.load import load_sharded

        shard = load_sharded(folder, layout, device=place, dtype=dtype)
        return Engine(shard, tokenizer or open_tokenizer(folder), **settings)
    tokenizer = tokenizer or open_tokenizer(folder)
    if quantise is None:
        return load_engine(folder, tokenizer, device=place, dtype=dtype, **settings)
    model = load_folder(folder, device=place, dtype=dtype).requires_grad_(False)
    quantise_linears(model, quantise, head="int8" if quantise == "int4" else quantise)
    return Engine(_widened(model, dtype), tokenizer, **settings)


def load_engine(
    folder: storage.Location,
    tokenizer: Tokenizer | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    **settings: Any,
) -> Engine:
    """Return an engine for the weights of a model folder; on a GPU, kernels are compiled while they are read.

    Without a tokenizer it takes and returns token ids.
    """
    if device.type != "cuda" or "quantization_config" in read_folder_config(folder)[1]:
        model = load_folder(folder, device=device, dtype=dtype).requires_grad_(False)
        return Engine(_widened(model, dtype), tokenizer, **settings)
    start_compiler()
    model = allocate_folder(folder, device=device, dtype=dtype).requires_grad_(False)
    engine = Engine(model, tokenizer, **settings)
    load_weights(model, folder)
    return engine


def _widened(model: Transformer, dtype: torch.dtype | None) -> Transformer:
    """Compute in fp32 if a quantised model is on a CPU and no dtype is asked for.

    Codes become fp32 in the products anyway, and a CPU is many times slower in 16 bits; scales and what is dense are
    the smaller part of the memory.
    """
    weight, quantised = first_weight(model), any(isinstance(module, QuantisedCodes) for module in model.modules())
    return model.float() if dtype is None and quantised and weight.device.type == "cpu" else model
