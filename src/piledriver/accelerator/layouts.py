"""A model laid out as a `Layout` says: the strategy that asks the engine, and what an Accelerator notes of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from piledriver.engine import state as state_of
from piledriver.engine.apply import apply
from piledriver.engine.detach import detach
from piledriver.engine.failed_step import reset_after_failure
from piledriver.engine.lost_ranks import watch_forward
from piledriver.engine.mesh import Mesh
from piledriver.engine.offload.apply import offload_optimizer
from piledriver.engine.optimizer.local_step import step_locally
from piledriver.engine.optimizer.shard_states import shard_states, swap_parameters
from piledriver.engine.optimizer.stochastic_rounding import round_stochastically
from piledriver.runtime.collectives.agreement import check_agreement

if TYPE_CHECKING:
    from piledriver.accelerator.accelerator import Accelerator


class LaidOut:
    """As a `Layout` says: the engine does it."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.mesh = mesh
        self.device = device

    def lay_out(self, model: nn.Module, weights: Any = 0) -> None:
        """All of the engine's steps, in its order."""
        apply(model, self.mesh, device=self.device, weights=weights)

    def lay_out_optimizer(self, optimizer: Any) -> None:
        """Zero 1 and 2 share out its states; zero 3 has done so with the parameters. Then host memory and rounding."""
        if self.mesh.layout.zero in (1, 2) and not self.mesh.alone:
            shard_states(optimizer, self.mesh)
        if self.mesh.layout.offload != "none":
            offload_optimizer(optimizer)
        if self.mesh.layout.has_bf16_weights:
            round_stochastically(optimizer)
        else:
            step_locally(optimizer)

    def gradients(self, model: nn.Module) -> Iterator[Tensor]:
        """Also those that are kept whole, or for another stage, until a window ends."""
        yield from state_of.gradients_so_far(model)
        known = state_of.state_of(model)
        if known is not None and known.pipeline is not None:
            yield from known.pipeline.borrowed.gradients()

    def add_up(self, count: Tensor) -> Tensor:
        """Over the processes that hold different data; a pipeline's loss is that of all of them already."""
        total = count.clone()
        for axis in self.mesh.dp_groups:
            dist.all_reduce(total, group=axis.get_group())
        return total

    @property
    def reduce_size(self) -> int:
        """The data axes and the context axis."""
        return self.mesh.reduce_size

    @property
    def loss_is_of_all(self) -> bool:
        """A pipeline gives the loss of all processes' batches, not of this one's."""
        return self.mesh.layout.pp > 1

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Keep gradients local."""
        return state_of.no_sync(model)

    def sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Average in this backward."""
        return state_of.sync_in_backward(model)

    def on_failed_backward(self, model: nn.Module) -> None:
        """Drop what it left underway."""
        reset_after_failure(model)

    def release(self, model: nn.Module) -> None:
        """Average no longer."""
        detach(model)


def follow_layout(accelerator: Accelerator, model: nn.Module, before: dict[str, nn.Parameter]) -> None:
    """Remember which parameter took whose place, for optimizers that were made for the old ones."""
    now = dict(model.named_parameters())
    for name, old in before.items():
        if name not in now:
            accelerator._gone[old] = True
        elif now[name] is not old:
            accelerator._replaced[old] = now[name]
    for known in accelerator._optimizers:
        lay_out_optimizer(accelerator, known.optimizer)
    if (call := state_of.pipelined(model)) is not None:
        call.factor = accelerator._loss_factor


def lay_out_optimizer(accelerator: Accelerator, optimizer: Any) -> None:
    """Let an optimizer hold the parameters that took the place of its own, and its share of the states."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    swap_parameters(optimizer, accelerator._replaced, accelerator._gone)
    accelerator.strategy.lay_out_optimizer(optimizer)


def watch(accelerator: Accelerator, model: nn.Module) -> None:
    """Name ranks that are lost in a forward that communicates; a pipeline does so itself."""
    known = state_of.state_of(model)
    if known is None or known.mesh.alone or known.pipeline is not None:
        return
    tell = None
    if known.mesh.layout.debug or accelerator.world.debug:
        tell = functools.partial(check_agreement, accelerator.world.with_debug(), data=())
    watch_forward(model, tell)
