"""Isolate training from trackers that fail or hang.

Each tracker has a daemon thread and a bounded queue. A call waits briefly for its result, so that a fast tracker
behaves as if called directly; a slow one is no longer waited for. Failed and dropped calls are counted and logged once.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LOGGER = logging.getLogger(__name__)

# A lock and this queue are C code: with `queue.Queue` and `threading.Event` a call would cost several times as much.
Calls = queue.SimpleQueue[tuple[Callable[[], Any], threading.Lock] | None]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Time limits of tracker calls, in seconds."""

    start_s: float = 60.0
    """For connecting; after it, the tracker connects while values are queued."""
    call_s: float = 0.02
    """For one call."""
    slow_calls: int = 3
    """Number of slow calls after which calls return at once."""
    finish_s: float = 30.0
    """For sending the queue at the end."""
    queue_length: int = 1000
    """Length of the queue; further calls are dropped and counted."""


@dataclass(frozen=True, slots=True)
class Problems:
    """Failures of a tracker so far."""

    failed: int = 0
    dropped: int = 0
    unfinished: bool = False
    last: str = ""

    def __bool__(self) -> bool:
        return bool(self.failed or self.dropped or self.unfinished)


class Guard:
    """Calls to one tracker that never raise and never block for long.

    >>> guard = Guard("broken", Patience())
    >>> logging.disable(); guard.call(lambda: 1 / 0); logging.disable(logging.NOTSET)
    >>> guard.finish(lambda: None); guard.problems.failed, guard.problems.last
    (1, 'ZeroDivisionError: division by zero')
    """

    def __init__(self, name: str, patience: Patience, *, is_local: bool = False) -> None:
        """Guard a tracker; one that is local, such as a file of the run, is called in the calling thread."""
        self.name, self.is_local = name, is_local
        self._patience = patience
        self._calls: Calls = queue.SimpleQueue()
        self._slow = 0
        self._failed = 0
        self._dropped = 0
        self._unfinished = False
        self._last = ""
        self._thread: threading.Thread | None = None

    @property
    def problems(self) -> Problems:
        """Return the failures so far."""
        return Problems(self._failed, self._dropped, self._unfinished, self._last)

    def start(self, action: Callable[[], Any]) -> bool:
        """Start the tracker; return whether it succeeded in time."""
        before = self._failed
        return self._submit(action, self._patience.start_s) and self._failed == before

    def call(self, action: Callable[[], Any]) -> None:
        """Run one call of the tracker."""
        waits = self._slow < self._patience.slow_calls
        if not self._submit(action, self._patience.call_s if waits else 0.0) and waits:
            self._slow += 1

    def finish(self, action: Callable[[], Any]) -> None:
        """Run the queue and the finish of the tracker within the time limit; log what was lost."""
        done = self._submit(action, self._patience.finish_s)
        if not done:
            self._unfinished = True
            self._warn(f"did not finish within {self._patience.finish_s:g} s; unsent values are lost")
        elif self._thread is not None:
            self._calls.put(None)
            self._thread.join(self._patience.finish_s)
        self._thread = None
        if self._failed > 1 or self._dropped:
            _LOGGER.warning("tracker %s: %d calls failed, %d were dropped", self.name, self._failed, self._dropped)

    def _submit(self, action: Callable[[], Any], wait_s: float) -> bool:
        if self.is_local:
            try:
                action()
            except Exception as error:
                self.failed(error)
            return True
        if self._thread is None:
            # A daemon: a tracker that hangs must not keep the process alive.
            self._thread = threading.Thread(
                target=_work, args=(self._calls, weakref.ref(self)), name=f"tracker-{self.name}", daemon=True
            )
            self._thread.start()
            # Without `finish` the thread runs the queue and ends when the guard is collected.
            weakref.finalize(self, _end, self._calls).atexit = False
        if self._calls.qsize() >= self._patience.queue_length:
            self._dropped += 1
            if self._dropped == 1:
                self._warn(f"is {self._patience.queue_length} calls behind; values are dropped until it catches up")
            return False
        done = threading.Lock()
        done.acquire()  # the tracker's thread releases it
        self._calls.put((action, done))
        return done.acquire(timeout=wait_s) if wait_s > 0 else False

    def failed(self, error: BaseException) -> None:
        """Count a call that raised, and log the first one."""
        self._failed += 1
        self._last = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if self._failed == 1:
            self._warn(f"failed; training continues without it: {self._last}")

    def _warn(self, what: str) -> None:
        _LOGGER.warning("tracker %s %s", self.name, what)


def _work(calls: Calls, held: weakref.ref[Guard]) -> None:
    while (item := calls.get()) is not None:
        action, done = item
        try:
            action()
        except BaseException as error:  # a tracker may raise SystemExit as well
            guard = held()
            if guard is not None:
                guard.failed(error)
            del guard
        finally:
            done.release()
            # Hold no reference while waiting for the next call.
            del item, action, done
        if held() is None and calls.empty():
            return


def _end(calls: Calls) -> None:
    calls.put(None)
