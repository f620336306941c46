"""Autoregressive decoding: prefill the key-value cache with the prompt, then decode one token at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.core.random import Stream
from piledriver.models import Transformer
from piledriver.models.decoding import cached_logits, decode


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.8
    """Divides the logits; 0 chooses the most likely token."""
    top_k: int | None = 50
    """Sample from this many of the most likely tokens; None samples from all."""
    seed: int = 0
    """Token i of row r depends on seed, r and i only."""


def generate(model: Transformer, prompts: Tensor, new_tokens: int, sampling: Sampling | None = None) -> Tensor:
    """Continue prompts of shape [batch, time]; return tokens of shape [batch, time + new_tokens]."""
    sampling = sampling or Sampling()
    batch, length = prompts.shape
    total = length + new_tokens
    if total > model.config.max_positions:
        raise UsageError(
            f"{length} + {new_tokens} tokens exceed the model's {model.config.max_positions} positions",
            fix=f"shorten the prompt, or ask for at most {max(model.config.max_positions - length, 0)} new tokens",
        )
    model.eval()
    streams = [Stream(sampling.seed, "generate", row) for row in range(batch)]
    return decode(
        cached_logits(model, batch, total),
        prompts.to(next(model.parameters()).device),
        new_tokens,
        lambda logits, position: _sample(logits, sampling, [stream.uniform(position) for stream in streams]),
    )


def _sample(logits: Tensor, sampling: Sampling, uniforms: list[float]) -> Tensor:
    """Return one token for each row by inverting the cumulative distribution at a given uniform number.

    The numbers come from counter-based streams, so there is no generator state and every device draws the same.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        threshold = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    cumulative = (logits / sampling.temperature).softmax(dim=-1).cumsum(dim=-1)
    points = torch.tensor(uniforms, device=logits.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, points, right=True).clamp_(max=logits.shape[-1] - 1).squeeze(1)
