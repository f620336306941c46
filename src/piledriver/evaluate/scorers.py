"""Models that can be scored: ours, and any causal language model of `transformers`, behind one small interface."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.models import Transformer, token_losses

_ROWS_AT_ONCE = 512


class Scorer(Protocol):
    """Gives the negative log-likelihood of tokens."""

    length: int
    """The longest window."""
    device: torch.device

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Nats of each target given the inputs up to it, [batch, time], fp32; 0 where the target is -100."""


class TransformerScorer:
    """Our own model."""

    def __init__(self, model: Transformer, length: int | None = None) -> None:
        self._model = model.eval()
        self.length = length or model.config.max_positions
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Scorer`."""
        hidden, _ = self._model.hidden(inputs)
        return token_losses(hidden, self._model.output_weight(), targets, softcap=self._model.config.logit_softcap)


class TransformersScorer:
    """A causal language model of the `transformers` library, or anything that maps `input_ids` to `.logits`."""

    def __init__(self, model: Any, length: int | None = None) -> None:
        self._model = model.eval()
        config = model.config
        known = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2048
        self.length = length or int(known)
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See `Scorer`."""
        logits = self._model(input_ids=inputs).logits.flatten(0, 1)
        goals = targets.flatten()
        # In parts, so that only a part of the logits is ever held in fp32.
        parts = zip(torch.split(logits, _ROWS_AT_ONCE), torch.split(goals, _ROWS_AT_ONCE), strict=True)
        losses = [F.cross_entropy(rows.float(), goal, ignore_index=-100, reduction="none") for rows, goal in parts]
        return torch.cat(losses).view_as(targets)
