"""A scheduler that steps once per optimizer step, however many processes there are.

Accelerate steps it once per process, so that a schedule written for one process ends N times too early (or has to be
written N times too long). Here one optimizer step is one scheduler step; `steps_per_optimizer_step` restores theirs for
scripts that were written around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piledriver.accelerator.state.accumulation import GradientState


class PreparedScheduler:
    """Wrapper of the user's scheduler that steps with the optimizer; everything else is forwarded."""

    _is_accelerate_prepared = True

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        gradient_state: GradientState | None = None,
        steps_per_optimizer_step: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state = gradient_state if gradient_state is not None else GradientState()
        self.steps_per_optimizer_step = 1 if split_batches else steps_per_optimizer_step

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if the optimizer did: not while gradients accumulate, not after a step that overflowed."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            return
        if any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers):
            return
        for _ in range(self.steps_per_optimizer_step):
            # A schedule with an end (OneCycleLR) raises beyond it; at its end it stays where it is.
            if self._is_over():
                return
            self.scheduler.step(*args, **kwargs)

    def _is_over(self) -> bool:
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and self.scheduler._step_count > total

    def get_last_lr(self) -> Any:
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
