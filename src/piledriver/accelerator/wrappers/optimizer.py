"""An optimizer that steps when a window ends, unscales fp16 gradients, and reports skipped steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from piledriver.accelerator.state.accumulation import GradientState
from piledriver.runtime.collectives.nested import send_to_device


class PreparedOptimizer(torch.optim.Optimizer):
    """Wrapper of the user's optimizer that decides when to step; everything else is forwarded."""

    _is_accelerate_prepared = True

    def __init__(
        self,
        optimizer: Any,
        device_placement: bool = True,
        scaler: Any = None,
        gradient_state: GradientState | None = None,
        device: torch.device | None = None,
    ) -> None:
        # Not the base class's constructor: it would make a second set of groups.
        self.optimizer = optimizer
        self.scaler = scaler
        self.gradient_state = gradient_state if gradient_state is not None else GradientState()
        self.device_placement = device_placement
        self._is_overflow = False
        self._stepped = False
        self._takes_set_to_none = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
        if scaler is not None and isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_post_hook(_StepSeen(self))
        if device_placement and device is not None and optimizer.state:
            optimizer.load_state_dict(send_to_device(optimizer.state_dict(), device))

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: Any) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> Any:
        """Switch to training mode, if the optimizer has one (schedule-free optimizers do)."""
        return self.optimizer.train() if callable(getattr(self.optimizer, "train", None)) else None

    def eval(self) -> Any:
        """Switch to evaluation mode, if the optimizer has one."""
        return self.optimizer.eval() if callable(getattr(self.optimizer, "eval", None)) else None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients, unless they are still being accumulated."""
        if not self.gradient_state.sync_gradients:
            return
        if self.scaler is not None:
            self.scaler.forget(self.optimizer)
        if set_to_none is None or not self._takes_set_to_none:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, unless gradients are still being accumulated; with a scaler, unless they overflowed."""
        if not self.gradient_state.sync_gradients:
            return None
        if self.scaler is None:
            self._is_overflow = False
            return self.optimizer.step(closure) if closure is not None else self.optimizer.step()
        self._stepped = False
        result = self.scaler.step(self.optimizer, closure) if closure else self.scaler.step(self.optimizer)
        self.scaler.update()
        self._is_overflow = not self._stepped
        return result

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was skipped because gradients overflowed."""
        return self._is_overflow

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self.optimizer!r})"


class _StepSeen:
    """A post hook that records that the scaler took a step."""

    def __init__(self, prepared: PreparedOptimizer) -> None:
        self.prepared = prepared

    def __call__(self, *_: Any) -> None:
        self.prepared._stepped = True
