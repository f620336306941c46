"""Losses that went wrong: not a number, or far above where they were. Seen, counted, and acted on as asked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from piledriver.train.config import SpikeConfig


@dataclass
class SpikeWatch:
    """The running mean and spread of the loss, and what did not fit them.

    >>> watch = SpikeWatch(SpikeConfig(warmup_steps=0))
    >>> [watch.is_spike(step, loss) for step, loss in enumerate([3.0, 2.9, 2.8, float("nan"), 9.0, 2.7])]
    [False, False, False, True, True, False]
    """

    config: SpikeConfig
    count: int = 0
    """Spikes so far."""
    left_out: int = 0
    """Steps whose update was left out: spikes under `skip`, overflows of fp16."""
    _mean: float | None = None
    _spread: float = field(default=0.0)

    def is_spike(self, step: int, loss: float) -> bool:
        """Judge one loss; what is none moves the running figures."""
        if not math.isfinite(loss):
            self.count += 1
            return True
        if self._mean is None:
            self._mean, self._spread = loss, 0.1 * abs(loss)
            return False
        limit = self._mean + self.config.factor * max(3 * self._spread, 0.2 * abs(self._mean))
        if step >= self.config.warmup_steps and loss > limit:
            self.count += 1
            return True
        self._spread = 0.95 * self._spread + 0.05 * abs(loss - self._mean)
        self._mean = 0.95 * self._mean + 0.05 * loss
        return False

    def is_broken(self, step: int, loss: float, norm: float | None) -> bool:
        """Judge a step by its loss and, where gradients are not scaled, by their norm: what is no number never is."""
        if norm is not None and not math.isfinite(norm) and math.isfinite(loss):
            self.count += 1
            return True
        return self.is_spike(step, loss)

    def state_dict(self) -> dict[str, float | int | None]:
        """For the checkpoint."""
        return {"count": self.count, "left_out": self.left_out, "mean": self._mean, "spread": self._spread}

    def load_state_dict(self, state: dict[str, float | int | None]) -> None:
        """From the checkpoint."""
        self.count, self.left_out = int(state["count"] or 0), int(state.get("left_out") or 0)
        self._mean, self._spread = state["mean"], float(state["spread"] or 0)
