"""Trackers, on the main process only."""

from __future__ import annotations

from typing import Any

from piledriver.accelerator.errors import NoTrackerError
from piledriver.runtime.world import World


class Trackers:
    """What `init_trackers`, `log` and `get_tracker` do."""

    def __init__(self, wanted: Any, logging_dir: str | None) -> None:
        self.logging_dir = logging_dir
        self.wanted: list[Any] = (
            [] if wanted is None else list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
        )
        self.started: list[Any] = []

    def start(self, world: World, project: str, config: dict[str, Any] | None, options: dict[str, Any]) -> None:
        """Start every tracker that was asked for."""
        raise NotImplementedError

    def get(self, world: World, name: str, unwrap: bool) -> Any:
        """One of them."""
        for tracker in self.started:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        raise NoTrackerError(f"{name} is not an available tracker stored in the Accelerator", fix="init_trackers first")

    def log(self, world: World, values: dict[str, Any], step: int | None, options: dict[str, Any]) -> None:
        """Log to every one."""
        if world.is_main:
            for tracker in self.started:
                tracker.log(values, step=step, **options.get(tracker.name, {}))

    def finish(self) -> None:
        """Close them."""
        for tracker in self.started:
            tracker.finish()
