"""Errors of the engine."""

from __future__ import annotations

from piledriver.core.errors import PiledriverError, UsageError


class LayoutError(UsageError, ValueError):
    """An invalid layout, reported before anything is allocated, with the nearest valid one."""


class PrecisionError(UsageError, ValueError):
    """A precision that this device or build cannot compute in, or an unknown name."""


class EngineError(PiledriverError, RuntimeError):
    """A failure while a prepared model was running."""
