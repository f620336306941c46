"""Learning-rate schedules: a pure function of how far training has come, in steps or tokens.

`scale_at` is the whole of it; `ScheduledLR` lets torch call it. One optimizer step is one scheduler step.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from piledriver.core.errors import ConfigError
from piledriver.core.schedules import schedule_scale
from piledriver.optim.config import ScheduleConfig


def scale_at(config: ScheduleConfig, position: float) -> float:
    """Return the fraction of the peak learning rate for the step that ends at `position` (steps or tokens, inclusive).

    >>> config = ScheduleConfig(kind="linear", warmup=10, total=110)
    >>> [scale_at(config, position) for position in (1, 10, 60, 110, 200)]
    [0.1, 1.0, 0.5, 0.0, 0.0]
    """
    return float(
        schedule_scale(
            config.kind,
            float(position),
            warmup=config.warmup,
            total=config.total,
            decay=config.decay_length,
            decay_shape=config.decay_shape,
            floor=config.floor,
        )
    )


class ScheduledLR(LRScheduler):
    """A torch scheduler around `scale_at`. One step adds `amount`: 1, or the tokens of a global batch."""

    def __init__(self, optimizer: Optimizer, config: ScheduleConfig, *, amount: int = 1) -> None:
        if config.unit == "steps" and amount != 1:
            raise ConfigError(f"amount is {amount} for a schedule in steps", fix="use 1, or a schedule in tokens")
        self.config, self.amount = config, amount
        self.done = -amount  # torch takes a step when it constructs
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Advance by one optimizer step."""
        self.done += self.amount
        super().step(epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group for the next step."""
        scale = scale_at(self.config, self.done + self.amount)
        return [base * scale for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the config is not saved, so that a run may be extended."""
        return {"done": self.done, "last_epoch": self.last_epoch, "base_lrs": self.base_lrs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position and set the learning rates."""
        self.done, self.last_epoch = state_dict["done"], state_dict["last_epoch"]
        self.base_lrs = list(state_dict["base_lrs"])
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = lr
