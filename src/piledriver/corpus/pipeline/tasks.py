"""Tasks: pure functions, each into a folder of its own that appears whole or not at all.

A task's key is a hash of its function and arguments, and the arguments name the keys of the tasks whose files it reads.
So a finished folder never becomes wrong: a killed build resumes with the missing tasks, a changed recipe or input
changes the keys of what depends on it and of nothing else, and leftovers of another build are never taken for a result.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from piledriver.core import storage
from piledriver.core.object_reference import load_object, object_reference

_RESULT = "result.json"


@dataclass(frozen=True)
class Task:
    """One call of a function that another process can import; see `Task.call`."""

    function: str
    arguments: dict[str, Any]
    payload: Any = field(default=None, compare=False)

    @classmethod
    def call(cls, function: Callable[..., dict[str, Any]], /, *, payload: Any = None, **arguments: Any) -> Task:
        """Return the task that runs `function(folder, **arguments)`.

        `function` is defined at the top of a module, writes its files into `folder` and returns what JSON can hold. Its
        arguments are JSON too, and decide what it writes. `payload` is passed on where it is given but is not part of
        the key: it must follow from the arguments (the path of a file whose checksum is an argument).
        """
        return cls(object_reference(function), arguments, payload)

    @property
    def key(self) -> str:
        """Return the hash that identifies the task."""
        described = json.dumps([self.function, self.arguments], sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(described.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True)
class TaskResult:
    """A finished task: its key, its folder and what its function returned."""

    key: str
    folder: str
    values: dict[str, Any]

    def path(self, name: str) -> str:
        """Return the path of a file that the task wrote."""
        return os.path.join(self.folder, name)


def finished_task(work: str, key: str) -> TaskResult | None:
    """Return the result of a task that was finished before, or None."""
    folder = task_folder(work, key)
    try:
        with open(os.path.join(folder, _RESULT), "rb") as file:
            return TaskResult(key, folder, json.loads(file.read()))
    except FileNotFoundError:
        return None


def execute_task(job: tuple[str, Task]) -> TaskResult:
    """Run one task of (work folder, task) unless it is finished, and return its result. All executors call this."""
    work, task = job
    result = finished_task(work, task.key)
    if result is not None:
        return result
    folder = task_folder(work, task.key)
    attempt = f"{folder}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    os.makedirs(attempt)
    try:
        payload = {} if task.payload is None else {"payload": task.payload}
        values = load_object(task.function)(attempt, **task.arguments, **payload)
        storage.write_text(os.path.join(attempt, _RESULT), json.dumps(values, ensure_ascii=False))
        _publish(attempt, folder)
    except BaseException:
        shutil.rmtree(attempt, ignore_errors=True)
        raise
    return TaskResult(task.key, folder, values)


def remove_partial_tasks(work: str) -> None:
    """Remove what interrupted tasks left. Call it at the start of a build only, while no task runs."""
    for root, folders, _ in os.walk(work):
        for name in folders:
            if name.endswith(".partial"):
                shutil.rmtree(os.path.join(root, name), ignore_errors=True)
        if root != work:
            folders.clear()


def has_documents(work: str) -> bool:
    """Return whether a finished task of a build has read a document."""
    found = (entry.path for top in _folders(work) for entry in _folders(top.path))
    results = (finished_task(work, os.path.basename(path)) for path in found)
    return any(result is not None and result.values.get("documents") for result in results)


def _folders(path: str) -> list[os.DirEntry[str]]:
    return [entry for entry in os.scandir(path) if entry.is_dir()] if os.path.isdir(path) else []


def work_folder(folder: str) -> str:
    """Return the work folder of a build, from the folder that one of its tasks fills."""
    return os.path.dirname(os.path.dirname(folder))


def task_folder(work: str, key: str) -> str:
    """Return the folder of a finished task."""
    # Two characters of fan-out: a large build has more tasks than one folder should have entries.
    return os.path.join(work, key[:2], key)


def sibling_folder(folder: str, key: str) -> str:
    """Return the folder of a finished task, from the folder that another task of the build fills."""
    return task_folder(work_folder(folder), key)


def _publish(attempt: str, folder: str) -> None:
    storage.fsync_folder(attempt)
    try:
        os.rename(attempt, folder)
    except OSError:
        # Another worker finished the same task first; its folder holds the same bytes.
        shutil.rmtree(attempt, ignore_errors=True)
        if not os.path.exists(os.path.join(folder, _RESULT)):
            raise
    storage.fsync_folder(os.path.dirname(folder))
