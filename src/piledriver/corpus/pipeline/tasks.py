"""Work that survives anything: each task is a pure function into a folder of its own, which appears whole or not at
all.

A task's key is a hash of its function and arguments, and the arguments name the keys of the tasks it reads. So a
finished folder is right for ever: a build that was killed goes on with what is missing, a changed recipe or input
changes the keys of what depends on it and of nothing else, and no left-over of an earlier run can be taken for a
result.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from piledriver.core import storage

_RESULT = "result.json"


@dataclass(frozen=True)
class Task:
    """`function` ("module:name") is called with the folder to fill and the arguments, and returns what JSON can hold.

    `payload` goes to the function too but not into the key: it must follow from the arguments.
    """

    function: str
    arguments: dict[str, Any]
    payload: Any = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """What the task is, in 128 bits."""
        described = json.dumps([self.function, self.arguments], sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(described.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Done:
    """A finished task: its folder and what its function returned."""

    key: str
    folder: str
    result: dict[str, Any]

    def path(self, name: str) -> str:
        """A file that the task made."""
        return os.path.join(self.folder, name)


def finished(work: str, key: str) -> Done | None:
    """The outcome of a task that was finished before, or None."""
    folder = task_folder(work, key)
    try:
        with open(os.path.join(folder, _RESULT), "rb") as file:
            return Done(key, folder, json.loads(file.read()))
    except FileNotFoundError:
        return None


def run_task(job: tuple[str, Task]) -> Done:
    """Run one task unless it is finished; what every executor calls."""
    work, task = job
    done = finished(work, task.key)
    if done is not None:
        return done
    folder = task_folder(work, task.key)
    attempt = f"{folder}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    os.makedirs(attempt)
    try:
        module, _, name = task.function.partition(":")
        function: Callable[..., dict[str, Any]] = getattr(importlib.import_module(module), name)
        given = {} if task.payload is None else {"payload": task.payload}
        result = function(attempt, **task.arguments, **given)
        storage.write_text(os.path.join(attempt, _RESULT), json.dumps(result, ensure_ascii=False))
        _appear(attempt, folder)
    except BaseException:
        shutil.rmtree(attempt, ignore_errors=True)
        raise
    return Done(task.key, folder, result)


def remove_leftovers(work: str) -> None:
    """Remove what interrupted tasks left. Only for the start of a build, when no task runs."""
    for root, folders, _ in os.walk(work):
        for name in folders:
            if name.endswith(".partial"):
                shutil.rmtree(os.path.join(root, name), ignore_errors=True)
        if root != work:
            folders.clear()


def work_of(folder: str) -> str:
    """The work folder, from the folder that a task is given to fill: how it finds the files of other tasks."""
    return os.path.dirname(os.path.dirname(folder))


def _appear(attempt: str, folder: str) -> None:
    storage.fsync_folder(attempt)
    try:
        os.rename(attempt, folder)
    except OSError:
        # Another worker finished the same task first; its folder holds the same bytes.
        shutil.rmtree(attempt, ignore_errors=True)
        if not os.path.exists(os.path.join(folder, _RESULT)):
            raise
    storage.fsync_folder(os.path.dirname(folder))


def task_folder(work: str, key: str) -> str:
    """Where a task's files are once it is finished."""
    # Two characters of fan-out: a large build has more tasks than a folder should have entries.
    return os.path.join(work, key[:2], key)
