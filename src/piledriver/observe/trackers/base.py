"""Tracker: the interface between a run and an experiment-tracking service."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from piledriver.core.errors import MissingDependencyError

Values = Mapping[str, Any]


@runtime_checkable
class Tracker(Protocol):
    """Protocol of trackers; subclasses of Accelerate's `GeneralTracker` satisfy it."""

    name: str
    requires_logging_directory: bool

    @property
    def tracker(self) -> Any:
        """Return the object of the service: a run, a writer, an experiment."""

    def store_init_configuration(self, values: Any) -> Any:
        """Store the config of the run."""

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> Any:
        """Log the values of one step."""

    def finish(self) -> Any:
        """Send queued values and close."""


class GeneralTracker:
    """Base class of trackers with Accelerate's names; each call does nothing unless overridden.

    A subclass sets `name` and `requires_logging_directory`, and has a `tracker` property. Its constructor only stores
    its arguments; `start` connects, so that ranks that never log do not.
    """

    main_process_only = True

    def __init__(self, _blank: bool = False) -> None:
        needed = ("name", "requires_logging_directory", "tracker")
        missing = [] if _blank else [name for name in needed if name not in dir(self)]
        if missing:
            raise NotImplementedError(f"the tracker class {type(self).__name__} must define {', '.join(missing)}")

    def start(self) -> None:
        """Connect to the service."""

    def store_init_configuration(self, values: Any) -> None:
        """Store the config of the run."""

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        """Log the values of one step."""

    def finish(self) -> None:
        """Send queued values and close."""


class WriterTracker(GeneralTracker):
    """Base of trackers with one service object, `writer`, that `start` creates and `finish` closes."""

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """Return the object of the service."""
        return self.writer

    def finish(self) -> None:
        """Close the writer, if it was started."""
        if self.writer is not None:
            self.writer.close()


def import_service(package: str) -> Any:
    """Import and return the package of a service; raise `MissingDependencyError` if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(package, extra="trackers", purpose=f"the {package} tracker") from error


def numbers_only(values: Values) -> dict[str, float]:
    """Return the numeric values, nested ones by path, for services that plot curves only.

    >>> numbers_only({"loss": 1, "note": "x", "eval": {"ppl": 2.5}})
    {'loss': 1, 'eval/ppl': 2.5}
    """
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": number for name, number in numbers_only(value).items()}
        elif isinstance(value, int | float):
            found[key] = value
    return found
