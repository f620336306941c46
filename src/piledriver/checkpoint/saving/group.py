"""The few collectives that a save needs, over a group of its own, so that they never mix with the training's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from piledriver.checkpoint.errors import CheckpointError
from piledriver.core.errors import PiledriverError

T = TypeVar("T")


class Ranks:
    """The processes that save together. One process needs no group and no communication.

    >>> alone = Ranks()
    >>> alone.size, alone.gathered("x"), alone.told("y")
    (1, ['x'], 'y')
    """

    def __init__(self, timeout: timedelta = timedelta(minutes=30)) -> None:
        distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if distributed else 0
        self.size = dist.get_world_size() if distributed else 1
        # gloo whatever the training uses: objects travel through host memory, and a thread may wait for them.
        self._group = dist.new_group(backend="gloo", timeout=timeout) if distributed else None

    @property
    def first(self) -> bool:
        """Whether this is the rank that plans and commits."""
        return self.rank == 0

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, on the first rank; an empty list elsewhere."""
        if self._group is None:
            return [value]
        found: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, found, dst=0, group=self._group)
        return found or []

    def shared(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def told(self, value: T) -> T:
        """The first rank's value, on every rank."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def handed(self, values: list[T] | None) -> T:
        """To each rank its own entry of the first rank's list."""
        if self._group is None:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, values if self.first else None, src=0, group=self._group)
        return box[0]  # type: ignore[no-any-return]

    def together(self, what: str, action: Callable[[], T]) -> T:
        """Run an action on every rank; if it fails anywhere it fails everywhere, naming the rank and the reason."""
        error: Exception | None = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        if self._group is None:
            if error is not None:
                raise error
            return result
        told = self.shared(None if error is None else _one_line(error))
        if error is not None:
            raise error
        failed = [(rank, text) for rank, text in enumerate(told) if text is not None]
        if failed:
            others = f" (and on {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise CheckpointError(f"{what} failed on rank {failed[0][0]}{others}: {failed[0][1]}")
        return result

    def close(self) -> None:
        """Give the group back. Not when a collector feels like it: other threads may be within a collective."""
        group, self._group = self._group, None
        # Not where the world it belonged to is gone: torch has no public way to ask.
        if group is not None and dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PiledriverError) else f"{type(error).__name__}: {text}"
