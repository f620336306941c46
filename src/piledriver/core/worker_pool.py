"""A pool of worker processes that survives its workers: results in the order of the tasks, crashes and hangs reported.

Workers are started with `python -m`, not forked or spawned by `multiprocessing`, so that nothing of the caller
(threads, locks, an unguarded `__main__`) gets into them. Each holds one task at a time. A worker that dies or exceeds
the time limit costs its task, which comes back as `Lost`; another worker takes its place.
"""

from __future__ import annotations

import importlib
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


@dataclass(frozen=True)
class Lost:
    """A task that took its worker with it."""

    task: Any
    why: str


class Workers:
    """`count` processes that run `target` (a `module:function` of one argument)."""

    def __init__(self, count: int, target: str, *, task_seconds: float = 600.0, memory_bytes: int = 4 << 30) -> None:
        self._target, self._task_seconds, self._memory_bytes = target, task_seconds, memory_bytes
        self._workers = [self._start() for _ in range(count)]

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """The results (or `Lost`) in the order of the tasks, with a few tasks a worker in flight."""
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
                    worker.give(number, task, self._task_seconds)
            self._collect(finished)
            while emitted in finished:
                yield finished.pop(emitted)
                emitted += 1

    def close(self) -> None:
        """Stop every worker."""
        for worker in self._workers:
            worker.stop()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _collect(self, finished: dict[int, Any]) -> None:
        """Wait for the next result, death or time limit, and note it."""
        busy = [worker for worker in self._workers if worker.busy is not None]
        if not busy:
            return
        patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
        ready = connection.wait([worker.pipe for worker in busy], timeout=patience)
        for position, worker in enumerate(self._workers):
            if worker.busy is None:
                continue
            number, task = worker.busy
            if worker.pipe in ready:
                try:
                    succeeded, result = worker.pipe.recv()
                    if not worker.started:
                        worker.started = True
                        continue
                    worker.busy = None
                except (EOFError, ConnectionError):
                    ended = worker.stop()
                    if not worker.started and worker.process.returncode > 0:
                        raise PiledriverError(
                            f"a worker process could not start ({ended})", fix="see its error above"
                        ) from None
                    finished[number] = Lost(task, f"the worker died ({ended})")
                    self._workers[position] = self._start()
                    continue
                if not succeeded:
                    raise result
                finished[number] = result
            elif time.monotonic() >= worker.deadline:
                worker.stop()
                finished[number] = Lost(task, f"took longer than {self._task_seconds:.0f} s")
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

    def give(self, number: int, task: Any, seconds: float) -> None:
        self.busy, self.deadline = (number, task), time.monotonic() + seconds
        try:
            self.pipe.send(task)
        except (BrokenPipeError, ConnectionError):
            # It died while idle or while reading; the next `recv` sees the end of the pipe and reports the task lost.
            return

    def stop(self) -> str:
        """End the process; returns how it ended."""
        self.pipe.close()
        try:
            self.process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        code = self.process.returncode
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def serve(descriptor: int, target: str, memory_bytes: int) -> None:
    """The child's side: run the target on each task until the parent closes the pipe or dies."""
    # Ctrl-C reaches the whole group; the parent decides what it means. A crash must not fill the disk with a core file.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    module, _, attribute = target.partition(":")
    run: Callable[[Any], Any] = getattr(importlib.import_module(module), attribute)
    pipe = connection.Connection(descriptor)
    try:
        pipe.send((True, "started"))
    except (BrokenPipeError, ConnectionError):
        # All tasks were done by others before this process stood ready.
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
            # The parent was interrupted and wants no answer.
            return


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    # Skip the interpreter's tear-down: nothing is left to flush, and native libraries need not say goodbye.
    os._exit(0)
