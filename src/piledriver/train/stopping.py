"""Stop on SIGTERM or SIGINT: the run ends after the current step, with a checkpoint, on all ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

# EX_TEMPFAIL of sysexits.h: launchers restart a job that exits with it.
STOPPED_EXIT_CODE = 75


class StopRequest:
    """Whether this process was asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, *_: object) -> None:
        """Handle a signal: note the request. A second signal raises `KeyboardInterrupt` at once."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the signals of a block into a request that the loop reads between steps."""
    request = StopRequest()
    before = {number: signal.signal(number, request.ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
