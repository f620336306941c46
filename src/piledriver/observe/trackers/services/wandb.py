"""Weights & Biases (`mode="offline"` writes to the local disk only), and SwanLab and trackio, which copy its API."""

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
        """Start the run."""
        self.run = import_service(self.name).init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: Values) -> None:
        """Store the config of the run."""
        self.run.config.update(dict(values))

    def log(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Log the values of one step."""
        self.run.log(dict(values), step=step, **kwargs)

    def finish(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()


class WandBTracker(ProjectRunTracker):
    """Further arguments go to `wandb.init`."""

    name = "wandb"

    def store_init_configuration(self, values: Values) -> None:
        """Store the config of the run."""
        self.run.config.update(dict(values), allow_val_change=True)

    def log_images(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images by name."""
        self.run.log(
            {k: [import_service("wandb").Image(image) for image in v] for k, v in values.items()}, step=step, **kwargs
        )

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table from columns and data, or from a data frame."""
        self.run.log(
            {table_name: import_service("wandb").Table(columns=columns, data=data, dataframe=dataframe)},
            step=step,
            **kwargs,
        )


class SwanLabTracker(ProjectRunTracker):
    """Further arguments go to `swanlab.init`."""

    name = "swanlab"


class TrackioTracker(ProjectRunTracker):
    """Further arguments go to `trackio.init`."""

    name = "trackio"
