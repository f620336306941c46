"""Rank, world size and device under Accelerate's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from piledriver.accelerator.options.handlers import DistributedType
from piledriver.runtime.collectives.barrier import barrier
from piledriver.runtime.collectives.split import split_between_processes
from piledriver.runtime.errors import WorldError
from piledriver.runtime.process_order import local_main_process_first, main_process_first, only_if
from piledriver.runtime.world import World

_KINDS = {
    "cuda": DistributedType.MULTI_GPU,
    "xpu": DistributedType.MULTI_XPU,
    "xla": DistributedType.XLA,
    "npu": DistributedType.MULTI_NPU,
    "hpu": DistributedType.MULTI_HPU,
}


def distributed_type(world: World) -> DistributedType:
    """Return Accelerate's name for a world.

    >>> distributed_type(World()).value
    'NO'
    """
    return _KINDS.get(world.device.type, DistributedType.MULTI_CPU) if world.is_distributed else DistributedType.NO


class ProcessInfo:
    """Properties of this process, and order of processes, for classes with a `world`."""

    world: World

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def distributed_type(self) -> DistributedType:
        return distributed_type(self.world)

    @property
    def num_processes(self) -> int:
        return self.world.size

    @property
    def process_index(self) -> int:
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        return self.world.local_rank

    @property
    def use_distributed(self) -> bool:
        return self.world.is_distributed

    @property
    def is_main_process(self) -> bool:
        return self.world.is_main

    @property
    def is_local_main_process(self) -> bool:
        return self.world.is_local_main

    @property
    def is_last_process(self) -> bool:
        return self.world.is_last

    def wait_for_everyone(self) -> None:
        """Return when every rank has called this; a timeout names the late ranks."""
        barrier(self.world, name="wait_for_everyone")

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run a block on rank 0 first, then on the other ranks."""
        with main_process_first(self.world):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run a block on local rank 0 of each node first, then on its other ranks."""
        with local_main_process_first(self.world):
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this rank's part of a list, a tensor or a dictionary of them."""
        with split_between_processes(self.world, inputs, apply_padding) as share:
            yield share

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function to run on rank 0 only."""
        return only_if(self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function to run on local rank 0 of each node only."""
        return only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorate a function to run on the highest rank only."""
        return only_if(self.is_last_process, function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function to run on one rank only."""
        rank, size = process_index or 0, self.num_processes
        if not 0 <= rank < size:
            raise WorldError(f"rank {rank} is not below the world size {size}", fix=f"choose 0 to {size - 1}")
        return only_if(self.process_index == rank, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function to run on one local rank of each node only."""
        return only_if(self.local_process_index == (local_process_index or 0), function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on local rank 0 of each node."""
        if self.is_local_main_process:
            print(*args, **kwargs)


@dataclass(frozen=True)
class RunState(ProcessInfo):
    """World and precision of a run: `accelerator.state`.

    >>> RunState(World(), "no").num_processes
    1
    """

    world: World
    mixed_precision: str

    @property
    def backend(self) -> str | None:
        return self.world.backend

    @property
    def debug(self) -> bool:
        """Return whether ranks compare each collective before it runs."""
        return self.world.debug
