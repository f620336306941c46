"""Errors of the engine."""

from __future__ import annotations

from piledriver.core.errors import PiledriverError, UsageError


class LayoutError(UsageError, ValueError):
    """A layout that cannot be: said before anything is allocated, with the nearest one that can."""


class EngineError(PiledriverError, RuntimeError):
    """Something went wrong while a laid-out model was running."""
