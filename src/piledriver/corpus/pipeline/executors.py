"""Executors: run tasks in processes of this machine or on a Ray cluster, with the same bytes."""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from piledriver.core.errors import PiledriverError, UnknownNameError, UsageError
from piledriver.core.lazy import import_optional
from piledriver.core.worker_pool import FailedTask, WorkerPool
from piledriver.corpus.pipeline.tasks import Task, TaskResult, execute_task, finished_task

# A cause outside the tasks may kill several workers in a row; a task that kills its own worker fails after as many.
_ATTEMPTS = 8
_OBJECT_STORE_BYTES = 200 << 20
_CONNECT_SECONDS = 10


class Executor(Protocol):
    """Runs tasks in a work folder."""

    def map(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """Yield the results in the order of the tasks. Finished tasks are not run again."""


class LocalExecutor:
    """Worker processes of this machine. A task whose worker dies is tried again, a few times."""

    def __init__(self, work: str, pool: WorkerPool) -> None:
        self._work, self._pool = work, pool

    def map(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """See `Executor`."""
        for outcome in self._pool.map((self._work, task) for task in tasks):
            yield self._retry(outcome) if isinstance(outcome, FailedTask) else outcome

    def _retry(self, failed: FailedTask) -> TaskResult:
        for _ in range(_ATTEMPTS - 1):
            with WorkerPool(1, execute_task) as pool:
                (outcome,) = pool.map([failed.task])
            if not isinstance(outcome, FailedTask):
                result: TaskResult = outcome
                return result
            failed = outcome
        _, task = failed.task
        raise PiledriverError(
            f"{task.function} failed {_ATTEMPTS} times: {failed.why}",
            fix="run the build again; finished tasks are kept",
        )


class RayExecutor:
    """A Ray cluster. All nodes must see the work folder; nodes may join and leave."""

    def __init__(self, work: str, ray: Any) -> None:
        self._work, self._ray = work, ray
        # Tasks are pure, so any number of attempts after a lost worker or node is safe.
        self._remote = ray.remote(num_cpus=1, max_retries=-1)(execute_task)

    def map(self, tasks: Iterable[Task]) -> Iterator[TaskResult]:
        """See `Executor`."""
        in_flight: deque[Any] = deque()
        for task in tasks:
            result = finished_task(self._work, task.key)
            in_flight.append(result if result is not None else self._remote.remote((self._work, task)))
            if len(in_flight) >= self._max_in_flight():
                yield self._wait(in_flight.popleft())
        while in_flight:
            yield self._wait(in_flight.popleft())

    def _wait(self, item: Any) -> TaskResult:
        if isinstance(item, TaskResult):
            return item
        try:
            result: TaskResult = self._ray.get(item)
        except self._ray.exceptions.RayTaskError as error:
            # Raise the task's own exception, as the local executor does.
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except self._ray.exceptions.RayError as error:
            message = str(error).strip().split("\n")[0]
            raise PiledriverError(
                f"Ray lost a task: {message}",
                fix="run the build again when the cluster has recovered; finished tasks are kept",
            ) from error
        return result

    def _max_in_flight(self) -> int:
        return 3 * max(1, int(self._ray.cluster_resources().get("CPU", 1)))


@contextmanager
def open_executor(name: str, work: str, workers: int) -> Iterator[Executor]:
    """Open an executor: `local`; `ray`, a cluster on this machine; `ray:HOST:PORT`, a running cluster."""
    os.makedirs(work, exist_ok=True)
    kind, _, address = name.partition(":")
    if name == "local":
        with WorkerPool(workers, execute_task, task_seconds=24 * 3600.0, memory_bytes=1 << 40) as pool:
            yield LocalExecutor(work, pool)
    elif kind == "ray":
        ray = import_optional("ray", extra="ray", purpose="the ray executor")
        ours = not ray.is_initialized()
        if ours:
            _connect(ray, address, workers)
        try:
            yield RayExecutor(os.path.abspath(work), ray)
        finally:
            if ours:
                ray.shutdown()
    else:
        raise UnknownNameError("executor", name, ["local", "ray"])


def _connect(ray: Any, address: str, workers: int) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        # Results are a few hundred bytes each; tasks write their output to files.
        store = _OBJECT_STORE_BYTES
        try:
            ray.init("local", num_cpus=workers, object_store_memory=store, include_dashboard=False, **quiet)
        except Exception as error:  # Ray raises plain and internal errors alike
            raise PiledriverError(
                f"Ray did not start on this machine: {(str(error).strip() or repr(error)).splitlines()[0]}",
                fix="check free memory, /dev/shm and /tmp/ray, or use the local executor",
            ) from error
        return
    try:
        _check_port(address)
        ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"no Ray cluster answers at {address}: {str(error).strip().splitlines()[0]}",
            fix="start one (`ray start --head`) and give its address as ray:HOST:PORT",
        ) from error


def _check_port(address: str) -> None:
    """Raise if no process listens at HOST:PORT. Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
