"""Lists of finished tasks as files: a task that reads the results of a whole stage takes one key as its argument.

If the list itself were an argument, each of a million tasks would carry, hash and send a list of a million keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.corpus.dedup.arrays import open_array, write_arrays
from piledriver.corpus.dedup.runs import RunLookup, SortedRun
from piledriver.corpus.pipeline.executors import Executor
from piledriver.corpus.pipeline.tasks import Task, task_folder

_ROW = np.dtype([("key", "S32"), ("first", np.uint64), ("count", np.uint64)])


def store_catalogue(executor: Executor, entries: Iterable[tuple[str, int, int]]) -> str:
    """Store a list of (task key, ordinal of its first item, items) and return the key of the list."""
    (result,) = executor.map([Task.call(write_catalogue, entries=[list(entry) for entry in entries])])
    return result.key


def write_catalogue(folder: str, entries: list[list[Any]]) -> dict[str, Any]:
    """Write such a list (a task)."""
    write_arrays(folder, tasks=np.array([tuple(entry) for entry in entries], _ROW))
    return {"entries": len(entries)}


class Catalogue:
    """A stored list of tasks."""

    def __init__(self, work: str, key: str) -> None:
        self._work = work
        self._rows = open_array(task_folder(work, key), "tasks")

    def key(self, number: int) -> str:
        """Return the key of one task."""
        return str(self._rows["key"][number].decode())

    def first(self, number: int) -> int:
        """Return the ordinal of the first item of one task."""
        return int(self._rows["first"][number])

    def folder(self, number: int) -> str:
        """Return the folder of one task."""
        return task_folder(self._work, self.key(number))

    def runs(self, low: int = 0, high: int | None = None) -> Iterator[SortedRun]:
        """Yield the tasks [low, high) as runs."""
        for key, first, count in self._rows[low:high].tolist():
            yield SortedRun(task_folder(self._work, key.decode()), first, count)

    def lookup(self) -> RunLookup:
        """Return all tasks, to be looked up by the ordinals of their items."""
        return RunLookup(np.array(self._rows["first"]), self.folder)

    def owners(self, ordinals: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the number of the task that each item belongs to."""
        return np.searchsorted(self._rows["first"], ordinals.astype(np.uint64), side="right") - 1
