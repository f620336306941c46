"""One piece of device memory in which streamed blocks follow one another, as in a ring."""

from __future__ import annotations

from bisect import insort

import torch

from piledriver.engine.offload.pinned import page_aligned_empty

ALIGNMENT = 512
"""Of blocks and of the tensors in them, in bytes: kernels may choose, and round, by alignment."""


def round_to_alignment(nbytes: int) -> int:
    """Return bytes rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Arena:
    """Memory of fixed size. Spans are taken after the last one, or from the start when the end is reached.

    >>> arena = Arena(3 * 1024, torch.device("cpu"))
    >>> [arena.take(1024) for _ in range(4)]
    [0, 1024, 2048, None]
    >>> arena.free(0, None), arena.take(1024)
    (None, 0)
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = round_to_alignment(nbytes)
        if device.type == "cpu":
            self.memory = page_aligned_empty(torch.Size((max(self.nbytes, ALIGNMENT),)), torch.uint8)
        else:
            self.memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._taken: list[tuple[int, int]] = []
        self._next = 0
        self._freed: list[tuple[int, int, torch.cuda.Event]] = []

    def take(self, nbytes: int) -> int | None:
        """Return the start of free memory of so many bytes; None if there is no such piece."""
        size = round_to_alignment(nbytes)
        for begin in (self._next, 0):
            start = begin
            for taken, length in self._taken:
                if taken + length <= start:
                    continue
                if taken >= start + size:
                    break
                start = taken + length
            if start + size <= self.nbytes:
                insort(self._taken, (start, size))
                self._next = start + size
                return start
        return None

    def free(self, start: int, used_until: torch.cuda.Event | None) -> None:
        """Give a span back; the computation that used it ends at the event."""
        span = next(one for one in self._taken if one[0] == start)
        self._taken.remove(span)
        if used_until is not None:
            self._freed.append((start, start + span[1], used_until))

    def events(self, start: int, nbytes: int) -> list[torch.cuda.Event]:
        """Return, once, the events after which a span that was taken may be written."""
        end = start + round_to_alignment(nbytes)
        found = [event for begin, stop, event in self._freed if begin < end and start < stop]
        # An event covers its whole span: what remains of it stays listed.
        self._freed = [
            (begin, stop, event)
            for begin, stop, event in self._freed
            if not (begin >= start and stop <= end) and not event.query()  # type: ignore[no-untyped-call]
        ]
        return found
