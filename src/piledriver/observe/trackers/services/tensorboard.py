"""TensorBoard event files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piledriver.core.storage import Location
from piledriver.observe.trackers.base import Values, WriterTracker, import_service


class TensorBoardTracker(WriterTracker):
    """Writes to `logging_dir/run_name`; further arguments go to `SummaryWriter`."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: Location, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.logging_dir = Path(logging_dir) / run_name

    def start(self) -> None:
        """Open the event file."""
        import_service("tensorboard")
        self.writer = import_service("torch.utils.tensorboard").SummaryWriter(str(self.logging_dir), **self.init_kwargs)

    def store_init_configuration(self, values: Values) -> None:
        """Store the config as hyperparameters, which TensorBoard compares, and as text."""
        comparable = {
            key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in values.items()
        }
        self.writer.add_hparams(comparable, {}, run_name="hparams")
        self.writer.add_text("config", f"```json\n{json.dumps(values, indent=1, default=str)}\n```")
        self.writer.flush()

    def log(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Write numbers as scalars, text as text, dictionaries as several curves in one chart."""
        for key, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(key, value, global_step=step, **kwargs)
        self.writer.flush()

    def log_images(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)
