"""An optimizer: sign SGD with weight decay. Its keyword arguments are the settings that a config may give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class SignSGD(Optimizer):
    """Moves every weight by `lr` against the sign of its gradient (Bernstein et al., signSGD, 2018)."""

    # What the engine may do with it; see piledriver.optim.capability. The update of an element reads that element
    # only, so that a step may run on the local shards of sharded parameters.
    elementwise = True

    def __init__(self, params: Any, lr: float, *, weight_decay: float = 0.0, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "scale": scale})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"] * group["scale"])
