"""`Trigger`: a flag that any rank raises and all ranks see at the same step."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.runtime.collectives.operations import any_rank
from piledriver.runtime.world import World


@dataclass
class Trigger:
    """A flag that any rank may raise and every rank checks.

    >>> stop = Trigger(World())
    >>> stop.raise_flag()
    >>> stop.check(), stop.check()
    (True, False)
    """

    world: World
    raised: bool = False

    def raise_flag(self) -> None:
        """Raise the flag; other ranks see it at their next check."""
        self.raised = True

    def check(self) -> bool:
        """Return whether any rank raised the flag since the last check. A collective: every rank must call it."""
        asked = any_rank(self.world, self.raised)
        self.raised = False
        return asked
