"""The decode loop: prefill a cache with the prompt, then one token at a time.

What reads tokens (`NextLogits`) and what chooses among logits are functions, so that sampling, greedy decoding and
models of other libraries share one loop.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.models.attention.cache import KVCache
from piledriver.models.codes import first_weight
from piledriver.models.transformer import Transformer

NextLogits = Callable[[Tensor], Tensor]
"""Takes tokens [batch, time] that follow those of the calls before; returns logits [batch, vocab] of the next one."""


@torch.no_grad()
def decode(
    next_logits: NextLogits,
    prompts: Tensor,
    new_tokens: int,
    choose: Callable[[Tensor, int], Tensor],
    is_done: Callable[[Tensor], bool] | None = None,
) -> Tensor:
    """Continue prompts [batch, time] by at most `new_tokens`; return [batch, time + decoded].

    `choose` maps fp32 logits and the position of the next token to token ids [batch]. `is_done` sees all tokens so far
    and ends the loop early.
    """
    if prompts.shape[1] == 0:
        raise UsageError("the prompt is empty", fix="start it with the document boundary token of the tokenizer")
    tokens = fresh = prompts
    for _ in range(new_tokens):
        fresh = choose(next_logits(fresh).float(), tokens.shape[1])[:, None]
        tokens = torch.cat((tokens, fresh), dim=1)
        if is_done is not None and is_done(tokens):
            break
    return tokens


def cached_logits(model: Transformer, batch: int, length: int) -> NextLogits:
    """Return the `NextLogits` of a model, with a key-value cache for `length` tokens."""
    weight = first_weight(model)
    cache = KVCache(model.config, batch, length, device=weight.device, dtype=model.compute_dtype or weight.dtype)
    read = 0

    def next_logits(tokens: Tensor) -> Tensor:
        nonlocal read
        positions = torch.arange(read, read + tokens.shape[1], device=weight.device).expand(batch, -1)
        read += tokens.shape[1]
        logits: Tensor = model(tokens, cache=cache, positions=positions)[:, -1]
        return logits

    return next_logits


def most_likely(logits: Tensor, position: int) -> Tensor:
    """Choose the most likely token: greedy decoding."""
    return logits.argmax(dim=-1)
