"""Append lines to a file from a thread, several at a time, so that the calling thread only fills a queue."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

_EVERY_S = 0.5
# More than a loop logs in this time: what comes faster is written by the loop itself, so that the queue stays short.
_MOST_WAITING = 10_000


class LineWriter:
    """Writes entries as lines to a descriptor, which it owns; `line` makes the bytes of an entry, in its thread.

    Entries that still wait are written by `close`, when the writer is collected, and when the process ends.
    """

    def __init__(self, descriptor: int, line: Callable[[Any], bytes]) -> None:
        self._queue = _Queue(descriptor, line)
        self._thread: threading.Thread | None = None
        self._closed = weakref.finalize(self, self._queue.close)
        _WRITERS.add(self)

    def put(self, entry: Any) -> None:
        """Queue an entry; raises the error of the last write, once."""
        queue = self._queue
        queue.waiting.append(entry)
        if self._thread is None:
            self._start()
        elif queue.error is not None or len(queue.waiting) > _MOST_WAITING:
            queue.write()
            error, queue.error = queue.error, None
            if error is not None:
                raise error

    def _start(self) -> None:
        thread = threading.Thread(target=self._queue.run, name="line-writer", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:  # the interpreter is ending, or the process has no room for a thread
            self._queue.write()

    def close(self, *, sync: bool = False) -> None:
        """Write what waits and close the descriptor; raises the error of a write that failed."""
        queue = self._queue
        queue.sync = sync
        self._closed()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None
        if queue.error is not None:
            raise queue.error

    def forget(self) -> None:
        """Forget what waits, in a forked process: its parent writes that."""
        self._queue.after_fork()
        self._thread = None


class _Queue:
    """What the thread works on; it does not refer to the writer, which can thus be collected."""

    def __init__(self, descriptor: int, line: Callable[[Any], bytes]) -> None:
        self.waiting: deque[Any] = deque()
        self.error: Exception | None = None
        self.sync = False
        self._descriptor, self._line = descriptor, line
        self._busy = self._ended = False
        self._stop = threading.Event()
        # Reentrant: garbage that is collected while this thread writes may close the queue.
        self._lock = threading.RLock()

    def run(self) -> None:
        """Write what waits twice a second, until the queue is closed."""
        while not self._stop.wait(_EVERY_S):
            self.write()

    def write(self) -> None:
        """Write what waits, in one call; an error is kept."""
        with self._lock:
            if self._busy or self._ended:
                return
            self._busy = True
            self._write()
            self._busy = False
            if self._stop.is_set():
                self._end()

    def close(self) -> None:
        """Write what waits and close the descriptor."""
        self._stop.set()
        self.write()

    def _write(self) -> None:
        lines = []
        for _ in range(len(self.waiting)):
            try:
                lines.append(self._line(self.waiting.popleft()))
            except Exception as error:  # of this entry only
                self.error = error
        try:
            rest = memoryview(b"".join(lines))
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self.error = error

    def _end(self) -> None:
        self._ended = True
        try:
            self._write()
            if self.sync:
                os.fsync(self._descriptor)
        except OSError as error:
            self.error = error
        finally:
            os.close(self._descriptor)

    def after_fork(self) -> None:
        """Begin anew in a forked process."""
        self.waiting.clear()
        self._busy = False
        self._stop, self._lock = threading.Event(), threading.RLock()


_WRITERS: weakref.WeakSet[LineWriter] = weakref.WeakSet()


def _forget_all() -> None:
    for writer in list(_WRITERS):
        writer.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
