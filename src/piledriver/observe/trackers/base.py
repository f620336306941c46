"""What a tracker is: a few calls that any experiment-tracking service can answer."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from piledriver.core.errors import MissingDependencyError

Values = Mapping[str, Any]


@runtime_checkable
class Tracker(Protocol):
    """The protocol. Anything with these names will do, subclasses of Accelerate's `GeneralTracker` included."""

    name: str
    requires_logging_directory: bool

    @property
    def tracker(self) -> Any:
        """The service's own object: a run, a writer, an experiment."""

    def store_init_configuration(self, values: Any) -> Any:
        """Remember the configuration of the run."""

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> Any:
        """Record values of one step."""

    def finish(self) -> Any:
        """Send what is left and close."""


class GeneralTracker:
    """A base for trackers with the names that Accelerate users know; every call does nothing until overridden.

    A subclass sets `name` and `requires_logging_directory`, and has a `tracker` property. Its constructor only keeps
    its arguments; `start` connects, so that nothing is contacted from processes that never log.
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
        """Remember the configuration of the run."""

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        """Record values of one step."""

    def finish(self) -> None:
        """Send what is left and close."""


def load(package: str) -> Any:
    """A tracker's package, imported only now, or an error that says what to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(package, extra="trackers", purpose=f"the {package} tracker") from error


def numbers_only(values: Values) -> dict[str, float]:
    """The numeric values, nested ones by path, for services that draw curves and nothing else.

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
