"""Continue tokens: read the prompt once, then one token at a time from the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.core.random import Stream
from piledriver.models import KVCache, Transformer


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.8
    """0 takes the likeliest."""
    top_k: int | None = 50
    """Only the likeliest so many."""
    seed: int = 0
    """Token i of row r is a pure function of seed, r and i."""


@torch.no_grad()
def generate(model: Transformer, prompts: Tensor, new_tokens: int, sampling: Sampling | None = None) -> Tensor:
    """[batch, time] prompts to [batch, time + new_tokens]."""
    sampling = sampling or Sampling()
    batch, length = prompts.shape
    total = length + new_tokens
    if total > model.config.max_positions:
        raise UsageError(
            f"{length} tokens and {new_tokens} new ones are more than the model's {model.config.max_positions}",
            fix="shorten the prompt or ask for fewer",
        )
    model.eval()
    weight = next(model.parameters())
    cache = KVCache(model.config, batch, total, device=weight.device, dtype=model.compute_dtype or weight.dtype)
    tokens = torch.empty(batch, total, dtype=torch.long, device=weight.device)
    tokens[:, :length] = prompts
    luck = [Stream(sampling.seed, "generate", row) for row in range(batch)]
    begin = 0
    for end in range(length, total):
        positions = torch.arange(begin, end, device=weight.device).expand(batch, -1)
        logits = model(tokens[:, begin:end], cache=cache, positions=positions)[:, -1].float()
        tokens[:, end] = _draw(logits, sampling, [stream.uniform(end) for stream in luck])
        begin = end
    return tokens


def _draw(logits: Tensor, sampling: Sampling, uniforms: list[float]) -> Tensor:
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    reached = (logits / sampling.temperature).softmax(dim=-1).cumsum(dim=-1)
    # The inverse of the distribution function at a number of our own: no generator state, the same on every device.
    marks = torch.tensor(uniforms, device=logits.device)[:, None] * reached[:, -1:]
    return torch.searchsorted(reached, marks, right=True).clamp_(max=logits.shape[-1] - 1).squeeze(1)
