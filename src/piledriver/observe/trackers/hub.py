"""Send the values of a run to all its trackers, from rank 0 only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from piledriver.core.errors import UnknownNameError
from piledriver.observe.trackers.base import GeneralTracker, Values
from piledriver.observe.trackers.guard import Guard, Patience, Problems
from piledriver.observe.trackers.values import copy_values


class TrackerHub:
    """The trackers of one rank. No call raises or hangs because of a tracker.

    Ranks other than 0 hold only trackers with `main_process_only = False`.
    """

    def __init__(self, trackers: Sequence[Any] = (), *, is_main: bool = True, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()
        self.trackers = [t for t in trackers if is_main or not getattr(t, "main_process_only", True)]
        self._guards = [
            Guard(str(tracker.name), self._patience, is_local=getattr(tracker, "is_local", False))
            for tracker in self.trackers
        ]
        self._local = [
            (tracker, guard) for tracker, guard in zip(self.trackers, self._guards, strict=True) if guard.is_local
        ]
        self._remote = [
            (tracker, guard) for tracker, guard in zip(self.trackers, self._guards, strict=True) if not guard.is_local
        ]

    def start(self, config: Values | None = None) -> None:
        """Connect each tracker and store the config."""
        for tracker, guard in zip(self.trackers, self._guards, strict=True):
            started = guard.start(getattr(tracker, "start", _nothing))
            if started and hasattr(tracker, "attach"):
                # For state of the calling thread, such as MLflow's active run.
                _quietly(guard, tracker.attach)
        if config is not None:
            self.store_init_configuration(config)

    def store_init_configuration(self, values: Values) -> None:
        """Store the config of the run with each tracker, as a copy."""
        for tracker, guard in zip(self.trackers, self._guards, strict=True):
            guard.call(partial(tracker.store_init_configuration, dict(values)))

    def log(
        self, values: Values, step: int | None = None, log_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Log values; `log_kwargs` holds further arguments by tracker name."""
        for tracker, guard in self._local:  # these copy what they keep
            try:
                tracker.log(values, step, **(log_kwargs.get(tracker.name, {}) if log_kwargs else {}))
            except Exception as error:
                guard.failed(error)
        if not self._remote:
            return
        now = copy_values(values)
        for tracker, guard in self._remote:
            further = log_kwargs.get(tracker.name, {}) if log_kwargs else {}
            guard.call(partial(tracker.log, dict(now), step=step, **further))

    def log_images(self, values: Values, step: int | None = None, **kwargs: Any) -> None:
        """Log images with the trackers that support them."""
        self._where_possible("log_images", values, step=step, **kwargs)

    def log_table(self, table_name: str, **kwargs: Any) -> None:
        """Log a table (`columns`, `data` or `dataframe`, `step`) with the trackers that support it."""
        self._where_possible("log_table", table_name, **kwargs)

    def get(self, name: str, *, unwrap: bool = False) -> Any:
        """Return a tracker by name, or the object of its service; without trackers, one that does nothing."""
        if not self.trackers:
            return GeneralTracker(_blank=True)
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        raise UnknownNameError("tracker", name, [str(tracker.name) for tracker in self.trackers])

    def finish(self) -> None:
        """Send queued values and close each tracker, within the time limit."""
        for tracker, guard in zip(self.trackers, self._guards, strict=True):
            guard.finish(tracker.finish)
            if hasattr(tracker, "detach"):
                _quietly(guard, tracker.detach)

    @property
    def problems(self) -> dict[str, Problems]:
        """Return the failures by tracker; empty if there are none."""
        return {guard.name: guard.problems for guard in self._guards if guard.problems}

    def _where_possible(self, method: str, *args: Any, **kwargs: Any) -> None:
        for tracker, guard in zip(self.trackers, self._guards, strict=True):
            if hasattr(tracker, method):
                guard.call(partial(getattr(tracker, method), *args, **kwargs))


def _nothing() -> None:
    return None


def _quietly(guard: Guard, action: Callable[[], Any]) -> None:
    try:
        action()
    except Exception as error:
        failure = error

        def again() -> None:
            raise failure

        # Counted and logged like any failure.
        guard.call(again)
