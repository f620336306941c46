"""Process order: run a block on the main process first, or a function on some ranks only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from piledriver.runtime.collectives.barrier import barrier
from piledriver.runtime.world import World


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


def only_if(mine: bool, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return the function, or one of the same name that returns None; without a function, a decorator."""
    if function is None:
        return functools.partial(only_if, mine)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if mine else None

    return call
