"""`accelerate.logging`: loggers that log on the main process only, or rank by rank."""

from __future__ import annotations

from piledriver.accelerator.logging import MultiProcessAdapter
from piledriver.accelerator.logging import get_logger as _get_logger
from piledriver.compat.accelerate.state import PartialState
from piledriver.runtime import environment
from piledriver.runtime.world import World


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger by name; its level may come from ACCELERATE_LOG_LEVEL."""
    return _get_logger(name, log_level or environment.snapshot().get("ACCELERATE_LOG_LEVEL"), _world)


def _world() -> World:
    if PartialState._shared_state == {}:
        raise RuntimeError(
            "You must initialize the accelerate state by calling either `PartialState()` or `Accelerator()` before "
            "using the logging utility."
        )
    return PartialState().world
