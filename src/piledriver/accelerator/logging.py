"""Loggers that log on the main process only, or rank by rank."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, MutableMapping
from typing import Any

from piledriver.runtime.collectives.barrier import barrier
from piledriver.runtime.world import World, detect_world


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]
    """Logs on the main process only; `main_process_only=False` logs on all, `in_order=True` one after the other."""

    def __init__(self, logger: logging.Logger, world: Callable[[], World]) -> None:
        super().__init__(logger, {})
        self._world = world

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log on the processes that the keyword arguments select."""
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        # The record shows the caller's line.
        kwargs.setdefault("stacklevel", 2)
        if not self.isEnabledFor(level):
            return
        world = self._world()
        if in_order and not main_process_only:
            for rank in range(world.size):
                if rank == world.rank:
                    self._write(level, msg, args, kwargs)
                barrier(world, name="logging in order")
        elif world.is_main or not main_process_only:
            self._write(level, msg, args, kwargs)

    def _write(self, level: int, msg: object, args: tuple[Any, ...], kwargs: MutableMapping[str, Any]) -> None:
        msg, kwargs = self.process(msg, kwargs)
        # One more frame than our caller's: this function.
        self.logger.log(level, msg, *args, **{**kwargs, "stacklevel": kwargs["stacklevel"] + 1})

    @functools.lru_cache(None)  # noqa: B019  (loggers live as long as the program)
    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Warn, unless the same warning was given before."""
        self.warning(*args, **kwargs)


def get_logger(
    name: str, log_level: str | None = None, world: Callable[[], World] = detect_world
) -> MultiProcessAdapter:
    """Return a logger by name."""
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
    return MultiProcessAdapter(logger, world)
