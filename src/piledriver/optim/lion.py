"""Lion: the sign of an interpolated momentum; one state per parameter (Chen et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from piledriver.kernels.masked_copy import masked_copy_
from piledriver.optim.conditional_step import call_closure, skip_flag
from piledriver.optim.groups import Params
from piledriver.optim.shards import local, local_gradient


class Lion(Optimizer):
    """Lion optimizer. Use about a third of AdamW's learning rate and three times its weight decay.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = Lion([weight], lr=0.1, weight_decay=0.0)
    >>> weight.grad = torch.tensor([5.0, -0.01])
    >>> optimizer.step()
    >>> weight.data
    tensor([0.9000, 1.1000])
    """

    elementwise = True
    skips_on_device = True

    def __init__(
        self, params: Params, lr: float = 1e-4, *, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.3
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on every parameter that has a gradient."""
        loss, skip = call_closure(closure), skip_flag(self)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            # A step that may be skipped is computed out of place: one parameter at a time, to save memory.
            for together in [parameters] if skip is None else [[parameter] for parameter in parameters]:
                if together:
                    self._update(together, group, skip)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        weights = [local(parameter) for parameter in parameters]
        gradients = [local_gradient(parameter) for parameter in parameters]
        momenta = [local(self.state[parameter]["exp_avg"]) for parameter in parameters]
        first, second = group["betas"]
        directions = torch._foreach_lerp(gradients, momenta, first)
        torch._foreach_sign_(directions)
        kept = 1.0 - group["lr"] * group["weight_decay"]
        moved, averaged = weights, momenta
        if skip is not None:
            moved, averaged = [one.clone() for one in weights], [one.clone() for one in momenta]
        torch._foreach_mul_(moved, kept)
        torch._foreach_add_(moved, directions, alpha=-group["lr"])
        torch._foreach_lerp_(averaged, gradients, 1.0 - second)
        if skip is not None:
            for old, new in zip([*weights, *momenta], [*moved, *averaged], strict=True):
                masked_copy_(old, new, skip)
