"""Collectives of a save or load, over a process group of their own, apart from those of training."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from piledriver.checkpoint.errors import CheckpointError
from piledriver.checkpoint.torch_private import is_live_group
from piledriver.core.errors import PiledriverError

T = TypeVar("T")


class RankGroup:
    """The ranks that save or load together. A single process needs no group.

    >>> alone = RankGroup()
    >>> alone.size, alone.gather("x"), alone.broadcast("y")
    (1, ['x'], 'y')
    """

    def __init__(self, timeout: timedelta = timedelta(minutes=30), *, alone: bool = False) -> None:
        """Make the group of all ranks, which all of them must do at the same point; or, `alone`, of this rank."""
        distributed = not alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if distributed else 0
        self.size = dist.get_world_size() if distributed else 1
        # gloo for any training backend: objects are sent through host memory, and a thread waits for them.
        self._group = dist.new_group(backend="gloo", timeout=timeout) if distributed else None

    @property
    def first(self) -> bool:
        """Return whether this is rank 0, which plans and commits."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, an empty list on the others."""
        if self._group is None:
            return [value]
        found: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, found, dst=0, group=self._group)
        return found or []

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def scatter(self, values: list[T] | None) -> T:
        """Return this rank's entry of the list of rank 0."""
        if self._group is None:
            assert values is not None
            return values[0]
        box: list[Any] = [None]
        dist.scatter_object_list(box, values if self.first else None, src=0, group=self._group)
        return box[0]  # type: ignore[no-any-return]

    def run_checked(self, what: str, action: Callable[[], T]) -> T:
        """Run an action on all ranks; if it fails on one, raise on all with that rank and the reason."""
        error: Exception | None = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        if self._group is None:
            if error is not None:
                raise error
            return result
        errors = self.all_gather(None if error is None else _one_line(error))
        if error is not None:
            raise error
        failed = [(rank, text) for rank, text in enumerate(errors) if text is not None]
        if failed:
            others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise CheckpointError(f"{what} failed on rank {failed[0][0]}{others}: {failed[0][1]}")
        return result

    def close(self) -> None:
        """Destroy the group. Not left to the garbage collector: another thread may be inside a collective."""
        group, self._group = self._group, None
        if group is not None and is_live_group(group):
            dist.destroy_process_group(group)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, PiledriverError) else f"{type(error).__name__}: {text}"
