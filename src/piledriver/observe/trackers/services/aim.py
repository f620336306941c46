"""Aim, which keeps runs in a local repository."""

from __future__ import annotations

import os
from typing import Any

from piledriver.observe.trackers.base import GeneralTracker, Values, import_service


class AimTracker(GeneralTracker):
    """One run in the repository `logging_dir`; further arguments go to `aim.Run`."""

    name = "aim"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.aim_repo_path = os.fspath(logging_dir)
        self.init_kwargs = kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.writer

    def start(self) -> None:
        """Open the repository."""
        run_class = import_service("aim").Run
        self.writer = run_class(repo=self.aim_repo_path, **self.init_kwargs)
        self.writer.name = self.run_name

    def store_init_configuration(self, values: Values) -> None:
        """As hyperparameters."""
        self.writer["hparams"] = dict(values)

    def log(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Each value under its name."""
        for key, value in values.items():
            self.writer.track(value, name=key, step=step, **kwargs)

    def log_images(self, values: Values, step: int | None = None, kwargs: Any = None) -> None:
        """Images, alone or as (image, caption)."""
        options = kwargs or {}
        for key, value in values.items():
            image, caption = value if isinstance(value, tuple) else (value, "")
            shown = import_service("aim").Image(image, caption=caption, **options.get("aim_image", {}))
            self.writer.track(shown, name=key, step=step, **options.get("track", {}))

    def finish(self) -> None:
        """Close the run."""
        if self.writer is not None:
            self.writer.close()
