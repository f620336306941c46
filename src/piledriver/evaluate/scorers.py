"""Models that can be scored: ours, and any causal language model of `transformers`, behind one small interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.engine.state import state_of
from piledriver.models import KVCache, Transformer, token_losses

_ROWS_AT_ONCE = 512


class Scorer(Protocol):
    """Gives the negative log-likelihood of tokens."""

    length: int
    """The longest window."""
    vocab_size: int
    """Ids that the model knows: one more than the largest."""
    device: torch.device

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Nats of each target given the inputs up to it, [batch, time], fp32; 0 where the target is -100."""

    def judge(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The losses, and whether each target is the likeliest token; true where the target is -100."""

    def greedy(self, ids: Sequence[int], most: int, is_done: Callable[[list[int]], bool]) -> list[int]:
        """The likeliest next token, again and again, until there are so many or `is_done` of those so far."""


class TransformerScorer:
    """Our own model, whole on this process."""

    def __init__(self, model: Transformer, length: int | None = None) -> None:
        _refuse_parts(model)
        self._model = model.eval()
        self.length = length or model.config.max_positions
        self.vocab_size = model.config.vocab_size
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Scorer`."""
        hidden, _ = self._model.hidden(inputs)
        return token_losses(hidden, self._model.output_weight(), targets, softcap=self._model.config.logit_softcap)

    @torch.no_grad()
    def judge(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Scorer`."""
        hidden, _ = self._model.hidden(inputs)
        return _judged((self._model.logits(rows) for rows in torch.split(hidden.flatten(0, 1), _ROWS_AT_ONCE)), targets)

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], most: int, is_done: Callable[[list[int]], bool]) -> list[int]:
        """See `Scorer`."""
        model, total = self._model, len(ids) + most
        weight = next(model.parameters())
        cache = KVCache(model.config, 1, total, device=weight.device, dtype=model.compute_dtype or weight.dtype)
        fresh, drawn = torch.tensor([list(ids)], device=weight.device), list[int]()
        while len(drawn) < most and not is_done(drawn):
            begin = len(ids) + len(drawn) - fresh.shape[1]
            positions = torch.arange(begin, begin + fresh.shape[1], device=weight.device)[None]
            fresh = model(fresh, cache=cache, positions=positions)[:, -1:].argmax(dim=-1)
            drawn.append(int(fresh))
        return drawn


class TransformersScorer:
    """A causal language model of the `transformers` library, or anything that maps `input_ids` to `.logits`."""

    def __init__(self, model: Any, length: int | None = None) -> None:
        self._model = model.eval()
        config = model.config
        known = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2048
        self.length = length or int(known)
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Scorer`."""
        return self.judge(inputs, targets)[0]

    @torch.no_grad()
    def judge(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """See `Scorer`."""
        logits = self._model(input_ids=inputs).logits.flatten(0, 1)
        return _judged(iter(torch.split(logits, _ROWS_AT_ONCE)), targets)

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], most: int, is_done: Callable[[list[int]], bool]) -> list[int]:
        """See `Scorer`."""
        fresh, past, drawn = torch.tensor([list(ids)], device=self.device), None, list[int]()
        while len(drawn) < most and not is_done(drawn):
            out = self._model(input_ids=fresh, past_key_values=past, use_cache=True)
            fresh, past = out.logits[:, -1:].argmax(dim=-1), out.past_key_values
            drawn.append(int(fresh))
        return drawn


def _refuse_parts(model: Transformer) -> None:
    """A model of which this process holds a part would score a part of each sequence, or nothing."""
    known = state_of(model)
    if known is None or known.mesh.alone:
        return
    layout = known.mesh.layout
    if layout.zero == 3 or max(layout.tp, layout.pp, layout.cp, layout.ep) > 1:
        raise UsageError(
            f"a model laid out as {layout} is not whole on a process, and cannot be scored there",
            fix="score a whole copy: Transformer(model.config) with accelerator.get_state_dict(model) loaded into it",
        )


def _judged(logits: Iterator[Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and hits from the logits of a few rows at a time: all of them in fp32 would not fit."""
    losses, hits = [], []
    for rows, goal in zip(logits, torch.split(targets.flatten(), _ROWS_AT_ONCE), strict=True):
        losses.append(F.cross_entropy(rows.float(), goal, ignore_index=-100, reduction="none"))
        hits.append((rows.argmax(dim=-1) == goal) | (goal == -100))
    return torch.cat(losses).view_as(targets), torch.cat(hits).view_as(targets)
