"""Errors of the interchange."""

from __future__ import annotations

from piledriver.core.errors import PiledriverError


class InterchangeError(PiledriverError):
    """A checkpoint or config that cannot be converted without changing what the model computes."""
