"""Lists of finished tasks as files: what a task reads from all of a stage goes into its arguments as one key.

Were the list itself an argument, each of a million tasks would carry, hash and send a list of a million.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.corpus.dedup.arrays import ArrayFile, write_arrays
from piledriver.corpus.dedup.near import Run, Runs
from piledriver.corpus.pipeline.executors import Executor
from piledriver.corpus.pipeline.tasks import Task, task_folder

ARRAYS = "arrays"


def catalogued(executor: Executor, entries: Iterable[tuple[str, int, int]]) -> str:
    """The key of a list of (task, ordinal of its first item, items); the items of tasks follow each other."""
    (done,) = executor.map([Task(f"{__name__}:write_catalogue", {"entries": [list(entry) for entry in entries]})])
    return done.key


def write_catalogue(folder: str, entries: list[list[Any]]) -> dict[str, Any]:
    """The task that writes such a list."""
    keys, firsts, counts = (list(column) for column in zip(*entries, strict=True)) if entries else ([], [], [])
    write_arrays(
        os.path.join(folder, ARRAYS),
        keys=np.array(keys, "S32"),
        firsts=np.array(firsts, np.uint64),
        counts=np.array(counts, np.uint64),
    )
    return {"entries": len(entries)}


class Catalogue:
    """Such a list, read from inside a task by parts."""

    def __init__(self, work: str, key: str) -> None:
        self._work = work
        self._file = ArrayFile(os.path.join(task_folder(work, key), ARRAYS))

    def __len__(self) -> int:
        return self._file.count("keys")

    def key(self, number: int) -> str:
        """The key of one task."""
        return str(self._file.rows("keys", number, number + 1)[0].decode())

    def path(self, number: int) -> str:
        """The array file of one task."""
        return os.path.join(task_folder(self._work, self.key(number)), ARRAYS)

    def runs(self, low: int = 0, high: int | None = None) -> Iterator[Run]:
        """The tasks [low, high) with their array files."""
        high = len(self) if high is None else high
        columns = (self._file.rows(name, low, high).tolist() for name in ("keys", "firsts", "counts"))
        for key, first, count in zip(*columns, strict=True):
            yield Run(os.path.join(task_folder(self._work, key.decode()), ARRAYS), first, count)

    def by_number(self) -> Runs:
        """All of them, for lookups by ordinal."""
        return Runs(self._file.whole("firsts"), self.path)

    def owners(self, ordinals: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Which task each ordinal belongs to."""
        return self._file.positions("firsts", ordinals.astype(np.uint64), side="right") - 1

    def first(self, number: int) -> int:
        """The ordinal of the first item of one task."""
        return int(self._file.rows("firsts", number, number + 1)[0])
