"""Comet; `online=False` writes an archive to the local disk only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from piledriver.observe.trackers.base import Values, WriterTracker, import_service


class CometMLTracker(WriterTracker):
    """One experiment of the project `run_name`; further arguments go to `comet_ml.start`."""

    name = "comet_ml"
    requires_logging_directory = False

    def start(self) -> None:
        """Start the experiment."""
        self.writer = import_service("comet_ml").start(project_name=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: Values) -> None:
        """Store the config as parameters."""
        self.writer.log_parameters(dict(values))

    def log(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, text as other, dictionaries as several metrics."""
        if step is not None:
            self.writer.set_step(step)
        for key, value in values.items():
            if isinstance(value, int | float):
                self.writer.log_metric(key, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(key, value, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.log_metrics(value, step=step, **kwargs)

    def log_images(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images by name."""
        for key, images in values.items():
            for number, image in enumerate(images):
                self.writer.log_image(image, name=f"{key}/{number}", step=step, **kwargs)

    def finish(self) -> None:
        """End the experiment."""
        if self.writer is not None:
            self.writer.end()
