"""Who goes first, and who does it at all: the order of processes around a block or a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from piledriver.runtime.collectives.barrier import barrier
from piledriver.runtime.errors import WorldError
from piledriver.runtime.world import World

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def main_process_first(world: World) -> Iterator[None]:
    """The main process runs the block first (downloads, writes a cache); the others run it after.

    >>> with main_process_first(World()):
    ...     print("once")
    once
    """
    with _first(world, world.is_main, "main_process_first"):
        yield


@contextmanager
def local_main_process_first(world: World) -> Iterator[None]:
    """The same per node: each node's first process runs the block before the others of that node."""
    with _first(world, world.is_local_main, "local_main_process_first"):
        yield


@contextmanager
def _first(world: World, goes_first: bool, name: str) -> Iterator[None]:
    if not goes_first:
        barrier(world, name=name)
    try:
        yield
    finally:
        # Also when the block failed: the others must not wait for one that will never come.
        if goes_first:
            barrier(world, name=name)


def on_main_process(world: World, function: Callable[P, R]) -> Callable[P, R | None]:
    """The function, called on rank 0 only; None elsewhere."""
    return only_if(world.is_main, function)


def on_local_main_process(world: World, function: Callable[P, R]) -> Callable[P, R | None]:
    """The function, called on the first process of each node only."""
    return only_if(world.is_local_main, function)


def on_last_process(world: World, function: Callable[P, R]) -> Callable[P, R | None]:
    """The function, called on the highest rank only."""
    return only_if(world.is_last, function)


def on_process(world: World, function: Callable[P, R], rank: int) -> Callable[P, R | None]:
    """The function, called on the given rank only."""
    if not 0 <= rank < world.size:
        raise WorldError(f"there is no rank {rank} in a world of {world.size}", fix=f"choose 0 to {world.size - 1}")
    return only_if(world.rank == rank, function)


def on_local_process(world: World, function: Callable[P, R], local_rank: int) -> Callable[P, R | None]:
    """The function, called on the process with the given local rank of each node only."""
    return only_if(world.local_rank == local_rank, function)


def only_if(mine: bool, function: Callable[P, R]) -> Callable[P, R | None]:
    """The function, or one of the same name that does nothing."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if mine else None

    return call
