"""How attention turns products of queries and keys into scores."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ScoreOptions(NamedTuple):
    """What changes the scores of a layer, beside the mask."""

    scale: float
    window: int | None = None
    """Keys that a query sees, its own included; None for all before it."""
    softcap: float | None = None
    """Limit of cap * tanh(score / cap)."""
    slopes: Tensor | None = None
    """[heads]: ALiBi's."""
    sinks: Tensor | None = None
    """[heads]: scores that take part in the softmax and attend to nothing."""
