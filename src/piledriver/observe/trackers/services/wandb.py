"""Weights & Biases; `mode="offline"` writes to the local disk only."""

from __future__ import annotations

from typing import Any

from piledriver.observe.trackers.base import Values, import_service
from piledriver.observe.trackers.services.project_run import ProjectRunTracker


class WandBTracker(ProjectRunTracker):
    """Further arguments go to `wandb.init`."""

    name = "wandb"

    def store_init_configuration(self, values: Values) -> None:
        """The run's config."""
        self.run.config.update(dict(values), allow_val_change=True)

    def log_images(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Lists of images by name."""
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
        """A table from columns and data, or from a data frame."""
        self.run.log(
            {table_name: import_service("wandb").Table(columns=columns, data=data, dataframe=dataframe)},
            step=step,
            **kwargs,
        )
