"""How a model is laid out over the processes: the seam where the engine's layouts plug in.

A strategy takes the user's model as it is and returns nothing new: what it changes, it changes inside. `Alone` is one
process, `Replicas` one copy per process; `layouts.LaidOut` is whatever a `Layout` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from piledriver.accelerator import replicas
from piledriver.accelerator.options import DistributedDataParallelKwargs
from piledriver.engine.layout import Layout
from piledriver.runtime.collectives.operations import reduce
from piledriver.runtime.world import World

if TYPE_CHECKING:
    from piledriver.engine.mesh import Mesh


class Strategy(Protocol):
    """What the Accelerator asks of a layout."""

    def lay_out(self, model: nn.Module, weights: Any = 0) -> None:
        """Spread a model over the processes, in place. Its parameters may become other objects.

        `weights` fill a model that has no memory yet.
        """

    def lay_out_optimizer(self, optimizer: Any) -> None:
        """Let an optimizer, whose parameters are the laid-out ones, hold its share of the states."""

    def gradients(self, model: nn.Module) -> Iterator[Tensor]:
        """Every gradient that has gathered on this process."""

    def add_up(self, count: Tensor) -> Tensor:
        """The sum of a count over the processes whose gradients are averaged."""

    @property
    def reduce_size(self) -> int:
        """How many processes a gradient is the mean of."""

    @property
    def loss_is_of_all(self) -> bool:
        """Whether a model's loss is that of all processes' batches already."""

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients local within the block."""

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average gradients in this backward whatever the forward pass said."""

    def on_failed_backward(self, model: nn.Module) -> None:
        """A backward failed: the next step must find nothing of it but gradients to clear."""

    def release(self, model: nn.Module) -> None:
        """Undo what `lay_out` did."""


class Alone:
    """One process: nothing to do."""

    reduce_size = 1
    loss_is_of_all = False

    def lay_out(self, model: nn.Module, weights: Any = 0) -> None:
        """Nothing."""

    def lay_out_optimizer(self, optimizer: Any) -> None:
        """Nothing."""

    def gradients(self, model: nn.Module) -> Iterator[Tensor]:
        """The parameters' own."""
        return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)

    def add_up(self, count: Tensor) -> Tensor:
        """It is the sum."""
        return count

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def on_failed_backward(self, model: nn.Module) -> None:
        """Nothing."""

    def release(self, model: nn.Module) -> None:
        """Nothing."""


class Replicas:
    """One copy per process, gradients averaged."""

    loss_is_of_all = False

    def __init__(self, world: World, options: DistributedDataParallelKwargs | None = None) -> None:
        self.world = world
        self.options = options

    def lay_out_optimizer(self, optimizer: Any) -> None:
        """Nothing: every process holds all of it."""

    def gradients(self, model: nn.Module) -> Iterator[Tensor]:
        """The parameters' own."""
        return (parameter.grad for parameter in model.parameters() if parameter.grad is not None)

    def add_up(self, count: Tensor) -> Tensor:
        """Over all processes."""
        total: Tensor = reduce(self.world, count, "sum")
        return total

    @property
    def reduce_size(self) -> int:
        """All processes."""
        return self.world.size

    def lay_out(self, model: nn.Module, weights: Any = 0) -> None:
        """Hook the reducer onto the model."""
        replicas.replicate(model, self.options)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients local."""
        return replicas.no_sync(model)

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average in this backward."""
        return replicas.sync_in_backward(model)

    def on_failed_backward(self, model: nn.Module) -> None:
        """The reducer cannot begin anew: the next forward gets another one."""
        replicas.renew(model, self.options)

    def release(self, model: nn.Module) -> None:
        """Unhook it."""
        replicas.forget(model)


def meshes_of(layout: Layout | None, device: torch.device) -> Mesh | None:
    """The mesh that a layout asks for, on the processes that are connected."""
    if layout is None:
        return None
    from piledriver.engine.mesh import make_mesh

    return make_mesh(layout, device.type)


def choose_strategy(
    world: World, options: DistributedDataParallelKwargs | None = None, mesh: Mesh | None = None
) -> Strategy:
    """The layout's, or one copy per process where the user gave none."""
    if mesh is not None:
        # The engine and the models that it knows take as long to import as torch: only for those who use them.
        from piledriver.accelerator.layouts import LaidOut

        return LaidOut(mesh, world.device)
    return Replicas(world, options) if world.is_distributed else Alone()


def place(model: nn.Module, device: torch.device) -> None:
    """Move a model to the device in place. Parameters that were one object stay one object."""
    if any(tensor.device != device for tensor in [*model.parameters(), *model.buffers()]):
        model.to(device)
