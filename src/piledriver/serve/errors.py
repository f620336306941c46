"""Errors of the engine as a whole; those of one request are `RequestError`."""

from __future__ import annotations

from piledriver.core.errors import PiledriverError


class ServeError(PiledriverError):
    """The engine cannot start as configured, or has stopped after a failure."""
