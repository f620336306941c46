"""What a report of a profile says: profiles of all ranks, and what they say together."""

from __future__ import annotations

from dataclasses import dataclass, field

from piledriver.observe.communication.bandwidth import Traffic
from piledriver.observe.profile.rank import RankProfile
from piledriver.observe.report.ranks import PathPart, Straggler


@dataclass(slots=True, kw_only=True)
class Advice:
    """One thing to change, with the number it rests on and the gain that is predicted."""

    rule: str
    title: str
    evidence: str
    """The measured number, in words."""
    change: str
    """What to do."""
    step_seconds: float
    """Seconds of a step now."""
    predicted_seconds: float
    """Seconds of a step after the change, as the planner's cost model predicts."""

    @property
    def gain(self) -> float:
        """How many times faster a step is predicted to be."""
        return self.step_seconds / self.predicted_seconds if self.predicted_seconds > 0 else 1.0


@dataclass(slots=True)
class ReportValues:
    """What a report says; `Report` adds how it is made and written."""

    title: str
    ranks: list[RankProfile]
    traffic: list[Traffic] = field(default_factory=list)
    stragglers: list[Straggler] = field(default_factory=list)
    critical_path: list[PathPart] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    plain_step_seconds: float | None = None
    """Seconds of a step before the profiler was on, where that was measured."""
    folder: str | None = None
    """Where the report was saved."""

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: the slowest rank's window over its steps."""
        return max(one.wall_seconds / one.steps for one in self.ranks)

    @property
    def error(self) -> str:
        """The error that ended the profile, such as an out-of-memory error; empty if there was none."""
        return next((one.error for one in self.ranks if one.error), "")
