"""Local SGD: each process steps on its own, and weights are averaged every few steps (Stich, ICLR 2019)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from piledriver.accelerator.errors import OptionError
from piledriver.runtime.collectives.operations import reduce

if TYPE_CHECKING:
    from piledriver.accelerator.accelerator import Accelerator


class LocalSGD:
    """`with LocalSGD(accelerator, model, local_sgd_steps=8) as local: ... local.step()`."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if accelerator.layout is not None and enabled:
            raise OptionError("local steps need a whole copy of the model on each process", fix="leave layout out")
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self.local_sgd_steps = local_sgd_steps
        self.accelerator = accelerator
        self.model = model
        self._local: AbstractContextManager[Any] | None = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._local = self.accelerator.no_sync(self.model)
            self._local.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._local is not None:
            self._average()
            self._local.__exit__(*exception)
            self._local = None

    def step(self) -> None:
        """Count an optimizer step, and average when it is time."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            parameter.copy_(reduce(self.accelerator.world, parameter.detach(), "mean"))
