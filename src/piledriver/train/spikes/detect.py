"""Losses that went wrong: not a number, or far above where they were. Seen, counted, and acted on as asked.

All of it is arithmetic on small float64 tensors where the loss lies: a verdict is another one, and nobody waits for it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from piledriver.train.config import SpikeConfig


class SpikeWatch:
    """The running mean and spread of the loss, and what did not fit them.

    >>> watch = SpikeWatch(SpikeConfig(warmup_steps=0))
    >>> losses = [3.0, 2.9, 2.8, float("nan"), 9.0, 2.7]
    >>> [bool(watch.judge(step, torch.tensor(loss))) for step, loss in enumerate(losses)]
    [False, False, False, True, True, False]
    """

    def __init__(self, config: SpikeConfig, device: torch.device | str = "cpu") -> None:
        self.config = config
        self._device = torch.device(device)
        self._mean, self._spread = self._number(math.nan), self._number(0.0)
        self.count = self._number(0)
        """Spikes so far."""
        self.left_out = self._number(0)
        """Steps whose update was left out: spikes under `skip`, overflows of fp16."""

    def judge(self, step: int, loss: Tensor, norm: Tensor | None = None) -> Tensor:
        """Whether a step went wrong, by its loss and, where gradients are not scaled, by their norm.

        What is no number always did; what did not moves the running figures.
        """
        loss, mean, spread = loss.double(), self._mean, self._spread
        broken = ~loss.isfinite()
        if norm is not None:
            broken = broken | ~norm.to(loss.device).isfinite()
        if step >= self.config.warmup_steps:
            # Before the first loss the mean is not a number, and nothing is above that.
            broken = broken | (loss > mean + self.config.factor * torch.maximum(3 * spread, 0.2 * mean.abs()))
        is_first = mean.isnan()
        moved = 0.95 * spread + 0.05 * (loss - mean).abs()
        self._spread = torch.where(broken, spread, torch.where(is_first, 0.1 * loss.abs(), moved))
        self._mean = torch.where(broken, mean, torch.where(is_first, loss, 0.95 * mean + 0.05 * loss))
        self.count = self.count + broken
        return broken

    def leave_out(self, skipped: Tensor | bool) -> None:
        """Count a step whose update was left out, if it was."""
        self.left_out = self.left_out + skipped

    def state_dict(self) -> dict[str, float | int | None]:
        """For the checkpoint; waits for the device."""
        mean = float(self._mean)
        return {
            "count": int(self.count),
            "left_out": int(self.left_out),
            "mean": None if math.isnan(mean) else mean,
            "spread": float(self._spread),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From the checkpoint."""
        mean = state["mean"]
        self._mean = self._number(math.nan if mean is None else mean)
        self._spread = self._number(state["spread"] or 0.0)
        self.count = self._number(state["count"] or 0)
        self.left_out = self._number(state.get("left_out") or 0)

    def _number(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float64, device=self._device)
