"""Weights & Biases; `mode="offline"` writes to the local disk only."""

from __future__ import annotations

from typing import Any

from piledriver.observe.trackers.base import GeneralTracker, Values, load


class WandBTracker(GeneralTracker):
    """One run of the project `run_name`; further arguments go to `wandb.init`."""

    name = "wandb"
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
        self.run = load("wandb").init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: Values) -> None:
        """The run's config."""
        self.run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Values of one step."""
        self.run.log(dict(values), step=step, **kwargs)

    def log_images(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Lists of images by name."""
        self.run.log({k: [load("wandb").Image(image) for image in v] for k, v in values.items()}, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """A table from columns and data, or from a data frame."""
        self.run.log(
            {table_name: load("wandb").Table(columns=columns, data=data, dataframe=dataframe)}, step=step, **kwargs
        )

    def finish(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.finish()
