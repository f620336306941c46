"""Trackers whose package gives a run by `init(project=...)` and takes values by `run.log`: wandb and those like it."""

from __future__ import annotations

from typing import Any

from piledriver.observe.trackers.base import GeneralTracker, Values, import_service


class ProjectRunTracker(GeneralTracker):
    """One run of the project `run_name`; further arguments go to the package's `init`."""

    name: str
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    def start(self) -> None:
        """Begin the run."""
        self.run = import_service(self.name).init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: Values) -> None:
        """The run's config."""
        self.run.config.update(dict(values))

    def log(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Values of one step."""
        self.run.log(dict(values), step=step, **kwargs)

    def finish(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()
