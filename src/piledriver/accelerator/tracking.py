"""Trackers of a run: chosen by `log_with`, started by `init_trackers` on the main process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piledriver.accelerator.errors import NoTrackerError, OptionError
from piledriver.observe.trackers import GeneralTracker, TrackerHub, choose_trackers, make_trackers
from piledriver.runtime.world import World


class Trackers:
    """Implements `init_trackers` and `get_tracker`. `classes` are tracker classes that the user registered."""

    def __init__(self, log_with: Any, logging_dir: str | None, classes: Mapping[str, Any] | None = None) -> None:
        self.logging_dir = logging_dir
        self.classes = dict(classes or {})
        given = list(log_with) if isinstance(log_with, (list, tuple)) else [] if log_with is None else [log_with]
        registered = [one for one in given if isinstance(one, str) and one in self.classes]
        for name in registered:
            if self.classes[name].requires_logging_directory and logging_dir is None:
                raise OptionError(
                    f"Logging with `{name}` requires a `logging_dir` to be passed in", fix="give project_dir"
                )
        self.wanted: list[Any] = (
            choose_trackers([one for one in given if one not in registered], logging_dir) + registered
        )
        self.hub = TrackerHub()

    def start(self, world: World, project: str, config: dict[str, Any] | None, options: dict[str, Any]) -> None:
        """Start every requested tracker."""
        known = [one for one in self.wanted if not (isinstance(one, str) and one in self.classes)]
        made = make_trackers(known, project, self.logging_dir, options)
        for name in self.wanted:
            if isinstance(name, str) and name in self.classes:
                kind = self.classes[name]
                folder = [self.logging_dir] if kind.requires_logging_directory else []
                made.append(kind(project, *folder, **options.get(name, {})))
        self.hub = TrackerHub(made, is_main=world.is_main)
        self.hub.start(config)

    def get(self, world: World, name: str, unwrap: bool) -> Any:
        """Return a tracker by name; on other processes one that does nothing."""
        for tracker in self.hub.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not world.is_main:
            return GeneralTracker(_blank=True)
        raise NoTrackerError(
            f"{name} is not an available tracker stored inside the `Accelerator`", fix="call init_trackers first"
        )

    def __getstate__(self) -> dict[str, Any]:
        # Connections and their threads belong to this process.
        return {**self.__dict__, "hub": TrackerHub()}
