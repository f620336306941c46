"""Step constants: what follows from the number of a step (bias corrections, the salt of its noise), on the device.

Usually the host counts steps. If steps may be skipped on the device (`conditional_step.py`), only the device knows the
number, and it cannot compute the hash that gives a salt. The constants of the next 512 steps are therefore computed
ahead and selected on the device. This synchronises once in 512 steps, and whenever other code wrote the counters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from piledriver.core.random import Stream
from piledriver.kernels.adamw import StepConstants
from piledriver.optim.conditional_step import skip_flag
from piledriver.optim.shards import local

LOOKAHEAD_STEPS = 512

Due = list[tuple[dict[str, Any], Tensor]]
"""(group, parameter) of every parameter that has a gradient."""


class StepCounter:
    """Advances `state["step"]` of an optimizer's parameters: `begin` a step, get its `constants`, `end` it."""

    def __init__(self) -> None:
        self._skip: Tensor | None = None
        self._now: dict[Any, StepConstants] = {}
        self._keys: dict[Tensor, Any] = {}
        self._ahead: dict[Any, _Ahead] = {}
        self._seen: dict[Tensor, tuple[Tensor, int]] = {}
        self._left = 0

    def begin(self, optimizer: Optimizer, due: Due) -> None:
        """Begin a step on these parameters."""
        self._skip, self._now = skip_flag(optimizer), {}
        states = {parameter: optimizer.state[parameter] for _, parameter in due}
        if self._skip is None:
            self._seen = {}
            self._count(due, states)
            return
        if self._left == 0 or not self._is_known(states):
            self._look_ahead(due, states)
        self._left -= 1

    def constants(self, parameter: Tensor) -> StepConstants:
        """Return the constants of the current step of a parameter."""
        key = self._keys[parameter]
        if key not in self._now:
            number, betas, seed, device = key
            if self._skip is None:
                corrections, salts = _constants_of([number], betas, seed, device)
                self._now[key] = StepConstants(corrections[0], salts[0], None)
            else:
                self._now[key] = self._ahead[key].pick(self._skip)
        return self._now[key]

    def end(self) -> None:
        """End the step: advance counters on the device, unless it was skipped."""
        if self._skip is None or not self._seen:
            return
        counters, one = [counter for counter, _ in self._seen.values()], (~self._skip).float()
        # A list: torch would read a single tensor as a scalar, which synchronises.
        torch._foreach_add_(counters, [one] * len(counters))
        self._seen = {parameter: (counter, counter._version) for parameter, (counter, _) in self._seen.items()}

    def _count(self, due: Due, states: dict[Tensor, dict[str, Any]]) -> None:
        self._keys = {}
        for group, parameter in due:
            state = states[parameter]
            state["step"] = state["step"].cpu()
            state["step"] += 1
            self._keys[parameter] = _key(int(state["step"]), group, parameter)

    def _is_known(self, states: dict[Tensor, dict[str, Any]]) -> bool:
        """Return whether the counters are unchanged since the last step, of the same parameters."""
        if states.keys() != self._seen.keys():
            return False
        return all(states[p]["step"] is counter and counter._version == at for p, (counter, at) in self._seen.items())

    def _look_ahead(self, due: Due, states: dict[Tensor, dict[str, Any]]) -> None:
        self._keys, self._ahead, self._seen, self._left = {}, {}, {}, LOOKAHEAD_STEPS
        counters = [states[parameter]["step"] for _, parameter in due]
        numbers: dict[int, int] = {}
        for device in dict.fromkeys(counter.device for counter in counters):
            here = [counter for counter in counters if counter.device == device]
            # One synchronisation for all of them; none if the host counted until now.
            numbers |= zip(map(id, here), map(int, torch.stack(here).tolist()), strict=True)
        for (group, parameter), counter in zip(due, counters, strict=True):
            moved = counter.to(local(parameter).device)
            states[parameter]["step"] = moved
            self._seen[parameter] = (moved, moved._version)
            key = self._keys[parameter] = _key(numbers[id(counter)], group, parameter)
            if key not in self._ahead:
                self._ahead[key] = _Ahead(moved, *key)


class _Ahead:
    """Constants of the steps after `start`, for parameters whose counters advance together."""

    def __init__(self, counter: Tensor, start: int, betas: tuple[float, float], seed: int, device: torch.device):
        self.counter, self.start = counter, start
        self.corrections, self.salts = _constants_of(range(start + 1, start + 1 + LOOKAHEAD_STEPS), betas, seed, device)

    def pick(self, skip: Tensor) -> StepConstants:
        at = (self.counter - self.start).long().view(1)
        return StepConstants(self.corrections.index_select(0, at)[0], self.salts.index_select(0, at)[0], skip)


def _key(number: int, group: dict[str, Any], parameter: Tensor) -> tuple[int, tuple[float, float], int, torch.device]:
    return number, tuple(group["betas"]), group["seed"], local(parameter).device


def _constants_of(numbers: Any, betas: tuple[float, float], seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    corrections = [[1.0 - betas[0] ** number, 1.0 - betas[1] ** number] for number in numbers]
    salts = [Stream(seed, "rounding", number).below(2**31, 0) for number in numbers]
    if len(salts) == 1:
        # Filled by kernels, because copying from the host would synchronise.
        made = torch.empty(1, 2, dtype=torch.float32, device=device)
        made[0, 0].fill_(corrections[0][0])
        made[0, 1].fill_(corrections[0][1])
        return made, torch.full((1,), salts[0], dtype=torch.int64, device=device)
    return (
        torch.tensor(corrections, dtype=torch.float32, device=device),
        torch.tensor(salts, dtype=torch.int64, device=device),
    )
