"""How a model is laid out over the processes: the seam where the engine's layouts plug in.

A strategy takes the user's model as it is and returns nothing new: what it changes, it changes inside. `Alone` is one
process, `Replicas` one copy per process.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from piledriver.accelerator import replicas
from piledriver.accelerator.options import DistributedDataParallelKwargs
from piledriver.runtime.world import World


class Strategy(Protocol):
    """What the Accelerator asks of a layout."""

    def lay_out(self, model: nn.Module) -> None:
        """Spread a model over the processes, in place. Its parameters may become other objects."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients local within the block."""

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average gradients in this backward whatever the forward pass said."""

    def release(self, model: nn.Module) -> None:
        """Undo what `lay_out` did."""


class Alone:
    """One process: nothing to do."""

    def lay_out(self, model: nn.Module) -> None:
        """Nothing."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def release(self, model: nn.Module) -> None:
        """Nothing."""


class Replicas:
    """One copy per process, gradients averaged."""

    def __init__(self, options: DistributedDataParallelKwargs | None = None) -> None:
        self.options = options

    def lay_out(self, model: nn.Module) -> None:
        """Hook the reducer onto the model."""
        replicas.replicate(model, self.options)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients local."""
        return replicas.no_sync(model)

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average in this backward."""
        return replicas.sync_in_backward(model)

    def release(self, model: nn.Module) -> None:
        """Unhook it."""
        replicas.forget(model)


def choose_strategy(world: World, options: DistributedDataParallelKwargs | None = None) -> Strategy:
    """The layout where the user gave none."""
    return Replicas(options) if world.is_distributed else Alone()


def place(model: nn.Module, device: torch.device) -> None:
    """Move a model to the device in place. Parameters that were one object stay one object."""
    if any(tensor.device != device for tensor in [*model.parameters(), *model.buffers()]):
        model.to(device)
