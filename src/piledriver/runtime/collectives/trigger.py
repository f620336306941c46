"""Any rank can ask all ranks for something (stop, save); all of them learn it at the same step."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.runtime.collectives.operations import any_rank
from piledriver.runtime.world import World


@dataclass
class Trigger:
    """One flag that any rank may raise and every rank checks.

    >>> stop = Trigger(World())
    >>> stop.raise_flag()
    >>> stop.check(), stop.check()
    (True, False)
    """

    world: World
    raised: bool = False

    def raise_flag(self) -> None:
        """Ask; the others hear of it when they check."""
        self.raised = True

    def check(self) -> bool:
        """Whether anybody asked since the last check. A collective: every rank must call it at the same place."""
        asked = any_rank(self.world, self.raised)
        self.raised = False
        return asked
