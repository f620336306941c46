"""Aim, which keeps runs in a local repository."""

from __future__ import annotations

import os
from typing import Any

from piledriver.observe.trackers.base import Values, WriterTracker, import_service


class AimTracker(WriterTracker):
    """One run in the repository `logging_dir`; further arguments go to `aim.Run`."""

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.aim_repo_path = os.fspath(logging_dir)

    def start(self) -> None:
        """Open the repository."""
        run_class = import_service("aim").Run
        self.writer = run_class(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    def store_init_configuration(self, values: Values) -> None:
        """Store the config as hyperparameters."""
        self.writer["hparams"] = dict(values)

    def log(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Track each value under its name."""
        for key, value in values.items():
            self.writer.track(value, name=key, step=step, **kwargs)

    def log_images(self, values: Values, step: int | None = None, kwargs: Any = None) -> None:
        """Track images, given alone or as (image, caption)."""
        options = kwargs or {}
        for key, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            shown = import_service("aim").Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(shown, name=key, step=step, **options.get("track", {}))
