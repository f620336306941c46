"""Errors of placing weights; each is also the built-in type that Accelerate raises there."""

from __future__ import annotations

from piledriver.core.errors import PiledriverError


class PlacementError(PiledriverError, ValueError):
    """A device map, a memory limit, a tensor or a checkpoint path that does not fit the model."""


class StrictLoadError(PiledriverError, RuntimeError):
    """A checkpoint that lacks weights of the model or holds others, loaded with `strict=True`."""
