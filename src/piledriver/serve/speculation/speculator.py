"""What guesses tokens ahead."""

from __future__ import annotations

from typing import Protocol

from piledriver.serve.scheduling.sequence import Sequence


class Speculator(Protocol):
    """Proposes draft tokens of each running sequence."""

    def propose(self, sequence: Sequence, count: int) -> list[int]:
        """Return at most `count` guesses of the tokens that follow; none if it is not worth it."""

    def observe(self, sequence: Sequence, *, proposed: int, accepted: int) -> None:
        """Note how many of the last guesses were right."""

    def forget(self, sequence: Sequence) -> None:
        """Drop what was kept for a sequence."""


class AcceptanceRate:
    """A running mean of the share of right guesses, which says when speculation pays."""

    def __init__(self, least: float = 0.2, retry_after: int = 32) -> None:
        self._least, self._retry_after = least, retry_after
        self._mean, self._pause = 1.0, 0

    def pays(self) -> bool:
        """Return whether to speculate now; after a pause it is tried again."""
        if self._pause > 0:
            self._pause -= 1
            return False
        return True

    def observe(self, proposed: int, accepted: int) -> None:
        """Add one observation."""
        self._mean = 0.8 * self._mean + 0.2 * accepted / proposed
        if self._mean < self._least:
            self._mean, self._pause = self._least + 0.1, self._retry_after
