"""The step that the AdamW variants with states of their own share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from piledriver.kernels.rounding import NOISE_STRIDE
from piledriver.optim.adamw.step_constants import StepCounter
from piledriver.optim.conditional_step import call_closure
from piledriver.optim.shards import first_row, local

Due = list[tuple[int, dict[str, Any], Tensor]]
"""(number, group, parameter) of every parameter that has a gradient; numbers count all parameters from 1."""


class NumberedAdamW(Optimizer):
    """AdamW whose number of steps gives bias corrections and rounding noise, on the device (`step_constants`).

    A subclass implements `_begin`, which makes a parameter's states, and `_update`, which steps on one parameter.
    """

    rounds_bf16 = True
    per_parameter = True
    skips_on_device = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._counter = StepCounter()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._counter = StepCounter()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on every parameter that has a gradient."""
        loss = call_closure(closure)
        numbered = enumerate(((group, one) for group in self.param_groups for one in group["params"]), start=1)
        due = [(number, group, one) for number, (group, one) in numbered if one.grad is not None]
        for _, group, parameter in due:
            if not self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32)
                self._begin(parameter, group)
        self._counter.begin(self, [(group, parameter) for _, group, parameter in due])
        self._update_all(due)
        self._counter.end()
        return loss

    def _update_all(self, due: Due) -> None:
        for number, group, parameter in due:
            if local(parameter).numel():
                # The engine sets a noise_id by name, so that noise does not depend on the other parameters.
                self._update(parameter, group, getattr(parameter, "noise_id", number * NOISE_STRIDE))

    def _begin(self, parameter: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _update(self, parameter: Tensor, group: dict[str, Any], noise_offset: int) -> None:
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep the dtypes of states: torch casts them to those of parameters."""
        super().load_state_dict(state_dict)
        ordered = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [index for group in state_dict["param_groups"] for index in group["params"]]
        for parameter, index in zip(ordered, numbers, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                device = value.device if name == "step" else parameter.device
                self.state[parameter][name] = value.detach().clone().to(device)


def first_index(parameter: Tensor) -> int:
    """Return the flat index in the full parameter of the local shard's first element, for sharding by rows."""
    weight = local(parameter)
    return first_row(parameter) * (weight[0].numel() if weight.dim() else 1)
