"""DVCLive, which writes metrics beside a DVC repository."""

from __future__ import annotations

from typing import Any

from piledriver.observe.trackers.base import GeneralTracker, Values, import_service, numbers_only


class DVCLiveTracker(GeneralTracker):
    """A `Live` of its own, or one that is given; further arguments go to `dvclive.Live`."""

    name = "dvclive"
    requires_logging_directory = False

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.live = live
        self.init_kwargs = kwargs

    @property
    def tracker(self) -> Any:
        """The `Live`."""
        return self.live

    def start(self) -> None:
        """Open the folder."""
        live_class = import_service("dvclive").Live
        if self.live is None:
            self.live = live_class(**self.init_kwargs)

    def store_init_configuration(self, values: Values) -> None:
        """Store the config as parameters."""
        self.live.log_params(dict(values))

    def log(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and text as metrics of one step."""
        if step is not None:
            self.live.step = step
        texts = {key: value for key, value in values.items() if isinstance(value, str)}
        for key, value in (numbers_only(values) | texts).items():
            self.live.log_metric(key, value, **kwargs)
        self.live.next_step()

    def finish(self) -> None:
        """Close the folder."""
        if self.live is not None:
            self.live.end()
