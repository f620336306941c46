"""Local SGD: each rank steps on its own, and weights are averaged every few steps (Stich, ICLR 2019)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from piledriver.engine.errors import LayoutError
from piledriver.engine.mesh import Mesh
from piledriver.engine.state import no_sync


class HasMesh(Protocol):
    """An `Accelerator`, as far as local SGD needs it."""

    @property
    def mesh(self) -> Mesh:
        """The ranks that train together."""


class LocalSGD:
    """`with LocalSGD(accelerator, model, local_sgd_steps=8) as local: ... local.step()`."""

    def __init__(self, accelerator: HasMesh, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        mesh = accelerator.mesh
        if enabled and not mesh.layout.replicates:
            raise LayoutError(
                f"local SGD needs a full replica of the model on every rank, but the layout is {mesh.layout!r}",
                fix="leave zero, tp, pp, cp, ep and offload out of the layout",
            )
        self.enabled = enabled and not mesh.alone
        self.num_steps = 0
        self.local_sgd_steps = local_sgd_steps
        self.model = model
        self._local: AbstractContextManager[Any] | None = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._local = no_sync(self.model)
            self._local.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._local is not None:
            self._average()
            self._local.__exit__(*exception)
            self._local = None

    def step(self) -> None:
        """Count an optimizer step, and average the weights every `local_sgd_steps`."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.data)
            parameter.div_(dist.get_world_size())
