"""Who runs the tasks: processes of this machine, or a Ray cluster. The bytes are the same."""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from piledriver.core.errors import MissingDependencyError, PiledriverError, UnknownNameError, UsageError
from piledriver.core.worker_pool import Lost, Workers
from piledriver.corpus.pipeline.tasks import Done, Task, finished, run_task

_RUN = "piledriver.corpus.pipeline.tasks:run_task"
# Whatever kills workers from outside may strike a few times in a row; a task that kills its own is told soon enough.
_ATTEMPTS = 8
_OBJECT_STORE_BYTES = 200 << 20
_ANSWER_SECONDS = 10


class Executor(Protocol):
    """Runs tasks in a work folder."""

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        """The outcomes, in the order of the tasks; tasks that are finished already are not run."""


class LocalExecutor:
    """Worker processes of this machine. A worker that dies costs its task another attempt, a few times."""

    def __init__(self, work: str, workers: Workers) -> None:
        self._work, self._workers = work, workers

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        """See `Executor`."""
        for outcome in self._workers.map((self._work, task) for task in tasks):
            yield self._again(outcome) if isinstance(outcome, Lost) else outcome

    def _again(self, lost: Lost) -> Done:
        for _ in range(_ATTEMPTS - 1):
            with Workers(1, _RUN) as workers:
                (outcome,) = workers.map([lost.task])
            if not isinstance(outcome, Lost):
                done: Done = outcome
                return done
            lost = outcome
        _, task = lost.task
        raise PiledriverError(
            f"{task.function} failed {_ATTEMPTS} times: {lost.why}", fix="run the build again; what is done is kept"
        )


class RayExecutor:
    """A Ray cluster. The work folder must be one that every node sees; nodes may come and go."""

    def __init__(self, work: str, ray: Any) -> None:
        self._work, self._ray = work, ray
        # A lost worker or node costs its tasks another attempt; they are pure, so any number of attempts is safe.
        self._remote = ray.remote(num_cpus=1, max_retries=-1)(run_task)

    def map(self, tasks: Iterable[Task]) -> Iterator[Done]:
        """See `Executor`."""
        in_flight: deque[Any] = deque()
        for task in tasks:
            done = finished(self._work, task.key)
            in_flight.append(done if done is not None else self._remote.remote((self._work, task)))
            if len(in_flight) >= self._most_in_flight():
                yield self._outcome(in_flight.popleft())
        while in_flight:
            yield self._outcome(in_flight.popleft())

    def _outcome(self, item: Any) -> Done:
        if isinstance(item, Done):
            return item
        try:
            done: Done = self._ray.get(item)
        except self._ray.exceptions.RayTaskError as error:
            # What went wrong is what the task said, not that Ray ran it.
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except self._ray.exceptions.RayError as error:
            said = str(error).strip().split("\n")[0]
            raise PiledriverError(
                f"Ray lost a task: {said}", fix="run the build again when the cluster is well; what is done is kept"
            ) from error
        return done

    def _most_in_flight(self) -> int:
        return 3 * max(1, int(self._ray.cluster_resources().get("CPU", 1)))


@contextmanager
def executor(name: str, work: str, workers: int) -> Iterator[Executor]:
    """Open an executor by name: `local`; `ray`, a cluster of this machine alone; `ray:HOST:PORT`, one that runs."""
    os.makedirs(work, exist_ok=True)
    kind, _, address = name.partition(":")
    if name == "local":
        with Workers(workers, _RUN, task_seconds=24 * 3600.0, memory_bytes=1 << 40) as pool:
            yield LocalExecutor(work, pool)
    elif kind == "ray":
        try:
            import ray
        except ImportError as error:
            raise MissingDependencyError("ray", extra="ray", purpose="the ray executor") from error
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
        # Results are a few hundred bytes: what tasks make is in files.
        store = _OBJECT_STORE_BYTES
        ray.init("local", num_cpus=workers, object_store_memory=store, include_dashboard=False, **quiet)
        return
    try:
        _knock(address)
        ray.init(address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"no Ray cluster answers at {address}: {str(error).strip().splitlines()[0]}",
            fix="start one (`ray start --head`) and give its address as ray:HOST:PORT",
        ) from error


def _knock(address: str) -> None:
    """Whether anybody listens at HOST:PORT: Ray itself asks for minutes before it gives up."""
    host, _, port = address.rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
