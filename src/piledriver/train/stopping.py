"""Asked to stop: SIGTERM and SIGINT end the run after the step in hand, with a checkpoint, on all processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

# What a launcher that restarts on failure takes for "go on later" (EX_TEMPFAIL of sysexits.h).
STOPPED_EXIT_CODE = 75


class StopRequest:
    """Whether somebody asked this process to stop."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, *_: object) -> None:
        """What the signal handlers call. A second signal is the user's impatience: the default takes over."""
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
