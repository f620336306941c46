"""A pool of worker processes: results in the order of the tasks; crashes and hangs are reported and survived.

Workers are started with `python -m`, not by `multiprocessing`, so that they inherit nothing of the caller: no threads
or locks of a fork, and no second run of a script whose `__main__` is unguarded. Each worker holds one task at a time. A
worker that dies or exceeds the time limit costs its task, which is returned as `FailedTask`; another worker takes its
place.

`pebble.ProcessPool` (5.2) is not used instead: it runs an unguarded `__main__` again, and workers that are killed while
they are idle break the whole pool.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from types import TracebackType
from typing import Any

from piledriver.core.errors import PiledriverError
from piledriver.core.object_reference import load_object, object_reference

_START_SECONDS = 600.0


@dataclass(frozen=True)
class FailedTask:
    """A task whose worker died or exceeded the time limit."""

    task: Any
    why: str


class WorkerPool:
    """`count` processes that call `target`, a module-level function of one argument.

    A task may take `task_seconds` and `memory_bytes` of data; more memory raises `MemoryError` in the worker.
    """

    def __init__(
        self, count: int, target: Callable[[Any], Any], *, task_seconds: float = 600.0, memory_bytes: int = 4 << 30
    ) -> None:
        self._target, self._task_seconds, self._memory_bytes = object_reference(target), task_seconds, memory_bytes
        self._workers = [self._start() for _ in range(count)]

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the results (or `FailedTask`) in the order of the tasks. An exception of the target is raised here."""
        upcoming = enumerate(tasks)
        finished: dict[int, Any] = {}
        emitted = taken = 0
        exhausted = False
        while not (exhausted and emitted == taken):
            for worker in self._workers:
                if worker.busy is None and not exhausted and taken - emitted < 3 * len(self._workers):
                    try:
                        number, task = next(upcoming)
                    except StopIteration:
                        exhausted = True
                        break
                    taken = number + 1
                    worker.send(number, task, self._task_seconds)
            self._collect(finished)
            while emitted in finished:
                yield finished.pop(emitted)
                emitted += 1

    def close(self) -> None:
        """Stop all workers."""
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, finished: dict[int, Any]) -> None:
        """Wait for the next result, death or time limit, and record it."""
        busy = [worker for worker in self._workers if worker.busy is not None]
        if not busy:
            return
        timeout = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
        ready = connection.wait([worker.pipe for worker in busy], timeout=timeout)
        for position, worker in enumerate(self._workers):
            if worker.busy is None:
                continue
            number, task = worker.busy
            if worker.pipe in ready:
                try:
                    succeeded, result = worker.pipe.recv()
                    if not worker.started:
                        worker.start_clock(self._task_seconds)
                        continue
                    worker.busy = None
                except (EOFError, ConnectionError):
                    ended = worker.stop()
                    if not worker.started and worker.process.returncode > 0:
                        raise PiledriverError(
                            f"a worker process could not start ({ended})", fix="see its error above"
                        ) from None
                    finished[number] = FailedTask(task, f"the worker died ({ended})")
                    self._workers[position] = self._start()
                    continue
                if not succeeded:
                    raise result
                finished[number] = result
            elif time.monotonic() >= worker.deadline:
                worker.stop()
                seconds = self._task_seconds if worker.started else _START_SECONDS
                finished[number] = FailedTask(task, f"took longer than {seconds:.0f} s")
                self._workers[position] = self._start()

    def _start(self) -> _Worker:
        return _Worker(self._target, self._memory_bytes)


class _Worker:
    """The parent's side of one process."""

    def __init__(self, target: str, memory_bytes: int) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), target, str(memory_bytes)]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self.pipe = connection.Connection(ours.detach())
        self.started = False
        self.busy: tuple[int, Any] | None = None
        self.deadline = 0.0

    def start_clock(self, seconds: float) -> None:
        self.started, self.deadline = True, time.monotonic() + seconds

    def send(self, number: int, task: Any, seconds: float) -> None:
        # The time of the first task counts from when the process is ready.
        self.busy, self.deadline = (number, task), time.monotonic() + (seconds if self.started else _START_SECONDS)
        try:
            self.pipe.send(task)
        except (BrokenPipeError, ConnectionError):
            # It died while idle or while reading; the next `recv` finds the end of the pipe and reports the task.
            return

    def stop(self) -> str:
        """End the process and return how it ended."""
        self.pipe.close()
        try:
            self.process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        code = self.process.returncode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def serve_tasks(descriptor: int, target: str, memory_bytes: int) -> None:
    """Run the target on each task in a worker process, until the parent closes the pipe or dies."""
    # Ctrl-C reaches the whole process group; the parent handles it. A crash must not fill the disk with a core file.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    run: Callable[[Any], Any] = load_object(target)
    pipe = connection.Connection(descriptor)
    try:
        pipe.send((True, "started"))
    except (BrokenPipeError, ConnectionError):
        # Other workers finished all tasks before this one had started.
        return
    while True:
        try:
            task = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = (True, run(task))
        except Exception as error:
            answer = (False, error)
        try:
            pipe.send(answer)
        except (BrokenPipeError, ConnectionError):
            # The parent was interrupted and no longer reads.
            return


if __name__ == "__main__":
    serve_tasks(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    # Skip the interpreter's tear-down: nothing is left to flush, and native libraries take long to unload.
    os._exit(0)
