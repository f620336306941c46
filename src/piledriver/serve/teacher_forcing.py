"""Deterministic mode outside the engine: the module's own log-probabilities, bit for bit those of served requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from piledriver.kernels.paged_attention import PagedBatch
from piledriver.kernels.sampling import token_logprobs
from piledriver.models import Transformer
from piledriver.models.codes import first_weight
from piledriver.serve.execution.build import choose_forward
from piledriver.serve.execution.pages import PagedCache

_BLOCK = 16


@contextmanager
def deterministic(model: Transformer) -> Iterator[Transformer]:
    """Within it, `model(tokens)` computes each row as the engine does in deterministic mode; without gradients.

    >>> from piledriver.models import ModelConfig
    >>> model = Transformer(ModelConfig(vocab_size=32, dim=16, layers=1, heads=2))
    >>> tokens = torch.tensor([[1, 2, 3, 4]])
    >>> with deterministic(model):
    ...     whole, start = model(tokens), model(tokens[:, :2])
    >>> bool((whole[:, :2] == start).all())
    True
    """

    def run(tokens: Tensor, **_: Any) -> tuple[Tensor, list[Tensor]]:
        del model.run  # the forward pass below calls the module's own
        try:
            with torch.no_grad():
                return torch.stack([_row(model, row) for row in tokens]), []
        finally:
            model.run = run  # type: ignore[method-assign]

    def logits(hidden: Tensor) -> Tensor:
        del model.logits
        try:
            with torch.no_grad():
                forward = choose_forward(model, PagedCache(model.config, 0, _BLOCK, length=0), deterministic=True)
                flat = forward.logits(hidden.flatten(0, -2))
            return torch.unflatten(flat, 0, hidden.shape[:-1])
        finally:
            model.logits = logits  # type: ignore[method-assign]

    def losses(hidden: Tensor, weight: Tensor, targets: Tensor, **_: Any) -> Tensor:
        goals = targets.flatten()
        found = -token_logprobs(logits(hidden).flatten(0, -2), goals.clamp(min=0))
        return found.masked_fill(goals < 0, 0.0).view_as(targets)

    usual = model.token_losses
    model.run, model.logits, model.token_losses = run, logits, losses  # type: ignore[method-assign]
    try:
        yield model
    finally:
        del model.run, model.logits
        model.token_losses = usual


def _row(model: Transformer, tokens: Tensor) -> Tensor:
    """Return the hidden states of one sequence, computed in one step with a cache of its own."""
    length, device = len(tokens), tokens.device
    weight = first_weight(model)
    blocks = -(-length // _BLOCK)
    dtype = model.compute_dtype or weight.dtype
    cache = PagedCache(model.config, blocks, _BLOCK, length=length, device=device, dtype=dtype)
    positions = torch.arange(length, device=device)
    batch = PagedBatch(
        torch.arange(blocks, dtype=torch.int32, device=device)[None],
        torch.tensor([0, length], dtype=torch.int32, device=device),
        torch.tensor([length], dtype=torch.int32, device=device),
        positions,
        length,
        length,
        ((length, length),),
        True,
    )
    return choose_forward(model, cache, deterministic=True).hidden(tokens, positions, batch)
