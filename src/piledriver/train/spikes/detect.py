"""Detect loss spikes: losses that are not finite or far above their running mean.

Everything is arithmetic on float64 scalars on the device of the loss, so the host does not wait for a verdict.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from piledriver.train.config import SpikeConfig


class SpikeWatch:
    """Running mean and spread of the loss, and counts of spikes and of skipped updates.

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
        self.skipped_updates = self._number(0)
        """Steps whose update was skipped: spikes with action `skip`, overflows of fp16."""

    def judge(self, step: int, loss: Tensor, norm: Tensor | None = None) -> Tensor:
        """Return whether a step is a spike, by its loss and, if gradients are not scaled, by their norm.

        A value that is not finite always is one. Other steps update the running mean and spread.
        """
        loss, mean, spread = loss.double(), self._mean, self._spread
        broken = ~loss.isfinite()
        if norm is not None:
            broken = broken | ~norm.to(loss.device).isfinite()
        if step >= self.config.warmup_steps:
            # Before the first loss the mean is NaN, and no comparison with it is true.
            broken = broken | (loss > mean + self.config.factor * torch.maximum(3 * spread, 0.2 * mean.abs()))
        is_first = mean.isnan()
        moved = 0.95 * spread + 0.05 * (loss - mean).abs()
        self._spread = torch.where(broken, spread, torch.where(is_first, 0.1 * loss.abs(), moved))
        self._mean = torch.where(broken, mean, torch.where(is_first, loss, 0.95 * mean + 0.05 * loss))
        self.count = self.count + broken
        return broken

    def count_skipped(self, skipped: Tensor | bool) -> None:
        """Add 1 to the skipped updates if `skipped` is true."""
        self.skipped_updates = self.skipped_updates + skipped

    def state_dict(self) -> dict[str, float | int | None]:
        """Return the state for a checkpoint; waits for the device."""
        mean = float(self._mean)
        return {
            "count": int(self.count),
            "left_out": int(self.skipped_updates),
            "mean": None if math.isnan(mean) else mean,
            "spread": float(self._spread),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        mean = state["mean"]
        self._mean = self._number(math.nan if mean is None else mean)
        self._spread = self._number(state["spread"] or 0.0)
        self.count = self._number(state["count"] or 0)
        self.skipped_updates = self._number(state.get("left_out") or 0)

    def _number(self, value: float) -> Tensor:
        return torch.full((), value, dtype=torch.float64, device=self._device)
