"""Errors of the planner: a request that cannot be planned, with the nearest one that can."""

from __future__ import annotations

from piledriver.core.errors import UsageError


class PlanError(UsageError):
    """A model, batch or layout that cannot be planned as given."""
