"""What the world says of this process, under Accelerate's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from piledriver.accelerator.options.handlers import DistributedType
from piledriver.runtime import process_order as order
from piledriver.runtime.collectives.barrier import barrier
from piledriver.runtime.collectives.split import split_between_processes
from piledriver.runtime.world import World

_KINDS = {
    "cuda": DistributedType.MULTI_GPU,
    "xpu": DistributedType.MULTI_XPU,
    "xla": DistributedType.XLA,
    "npu": DistributedType.MULTI_NPU,
    "hpu": DistributedType.MULTI_HPU,
}


def distributed_type(world: World) -> DistributedType:
    """Accelerate's name for a world.

    >>> distributed_type(World()).value
    'NO'
    """
    return _KINDS.get(world.device.type, DistributedType.MULTI_CPU) if world.is_distributed else DistributedType.NO


class ProcessInfo:
    """This process among all, and the order in which processes run a block. Needs only `self.world`."""

    world: World

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.world.device

    @property
    def distributed_type(self) -> DistributedType:
        """What kind of processes train together."""
        return distributed_type(self.world)

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self.world.size

    @property
    def process_index(self) -> int:
        """This process among all."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """This process on its node."""
        return self.world.local_rank

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world.is_distributed

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self.world.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.world.is_last

    def wait_for_everyone(self) -> None:
        """Return when every process has called this; names the late ones where they do not come."""
        barrier(self.world, name="wait_for_everyone")

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process runs the block first."""
        with order.main_process_first(self.world):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first process of each node runs the block first."""
        with order.local_main_process_first(self.world):
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This process's share of a list, a tensor or a dictionary of them."""
        with split_between_processes(self.world, inputs, apply_padding) as share:
            yield share

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: only rank 0 runs it."""
        return self._deferred(function, lambda world, f: order.on_main_process(world, f))

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: only the first process of each node runs it."""
        return self._deferred(function, lambda world, f: order.on_local_main_process(world, f))

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: only the highest rank runs it."""
        return self._deferred(function, lambda world, f: order.on_last_process(world, f))

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: only the given rank runs it."""
        return self._deferred(function, lambda world, f: order.on_process(world, f, process_index or 0))

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: only the given process of each node runs it."""
        return self._deferred(function, lambda world, f: order.on_local_process(world, f, local_process_index or 0))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print` on the first process of each node."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def _deferred(
        self, function: Callable[..., Any] | None, restrict: Callable[[World, Callable[..., Any]], Callable[..., Any]]
    ) -> Callable[..., Any]:
        if function is None:
            return lambda later: restrict(self.world, later)
        return restrict(self.world, function)


@dataclass(frozen=True)
class RunState(ProcessInfo):
    """What `accelerator.state` shows: the world and the precision of the run.

    >>> RunState(World(), "no").num_processes
    1
    """

    world: World
    mixed_precision: str

    @property
    def backend(self) -> str | None:
        """The process group's backend."""
        return self.world.backend

    @property
    def debug(self) -> bool:
        """Whether collectives are checked before they run."""
        return self.world.debug
