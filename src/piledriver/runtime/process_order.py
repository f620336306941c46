"""Process order: run a block on the main process first, or a function on some ranks only."""

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
    """Run a block on rank 0 first (to download, or write a cache), then on the other ranks.

    >>> with main_process_first(World()):
    ...     print("once")
    once
    """
    with _first(world, world.is_main, "main_process_first"):
        yield


@contextmanager
def local_main_process_first(world: World) -> Iterator[None]:
    """Run a block on local rank 0 of each node first, then on its other ranks."""
    with _first(world, world.is_local_main, "local_main_process_first"):
        yield


@contextmanager
def _first(world: World, goes_first: bool, name: str) -> Iterator[None]:
    if not goes_first:
        barrier(world, name=name)
    try:
        yield
    finally:
        # Also if the block failed: the other ranks must not wait forever.
        if goes_first:
            barrier(world, name=name)


def on_main_process(world: World, function: Callable[P, R]) -> Callable[P, R | None]:
    """Return the function for rank 0; on other ranks one that returns None."""
    return only_if(world.is_main, function)


def on_local_main_process(world: World, function: Callable[P, R]) -> Callable[P, R | None]:
    """Return the function for local rank 0 of each node; on other ranks one that returns None."""
    return only_if(world.is_local_main, function)


def on_last_process(world: World, function: Callable[P, R]) -> Callable[P, R | None]:
    """Return the function for the last rank; on other ranks one that returns None."""
    return only_if(world.is_last, function)


def on_process(world: World, function: Callable[P, R], rank: int) -> Callable[P, R | None]:
    """Return the function for one rank; on other ranks one that returns None."""
    if not 0 <= rank < world.size:
        raise WorldError(f"rank {rank} is not below the world size {world.size}", fix=f"choose 0 to {world.size - 1}")
    return only_if(world.rank == rank, function)


def on_local_process(world: World, function: Callable[P, R], local_rank: int) -> Callable[P, R | None]:
    """Return the function for one local rank of each node; on other ranks one that returns None."""
    return only_if(world.local_rank == local_rank, function)


def only_if(mine: bool, function: Callable[P, R]) -> Callable[P, R | None]:
    """Return the function, or one of the same name that returns None."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if mine else None

    return call
