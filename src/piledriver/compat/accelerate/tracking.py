"""`accelerate.tracking`: our trackers, and Accelerate's table to which users add classes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from piledriver.compat.accelerate.state import PartialState
from piledriver.compat.accelerate.utils.dataclasses import LoggerType
from piledriver.observe.trackers import GeneralTracker, available_trackers, choose_trackers
from piledriver.observe.trackers.services.aim import AimTracker
from piledriver.observe.trackers.services.clearml import ClearMLTracker
from piledriver.observe.trackers.services.comet_ml import CometMLTracker
from piledriver.observe.trackers.services.dvclive import DVCLiveTracker
from piledriver.observe.trackers.services.mlflow import MLflowTracker
from piledriver.observe.trackers.services.tensorboard import TensorBoardTracker
from piledriver.observe.trackers.services.wandb import SwanLabTracker, TrackioTracker, WandBTracker

# Registered classes are added here.
LOGGER_TYPE_TO_CLASS: dict[str, Any] = {
    "aim": AimTracker,
    "comet_ml": CometMLTracker,
    "mlflow": MLflowTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "clearml": ClearMLTracker,
    "dvclive": DVCLiveTracker,
    "swanlab": SwanLabTracker,
    "trackio": TrackioTracker,
}
_OURS = frozenset(LOGGER_TYPE_TO_CLASS)


def registered_classes() -> dict[str, Any]:
    """Return the classes that users registered."""
    return {name: kind for name, kind in LOGGER_TYPE_TO_CLASS.items() if name not in _OURS}


def register_tracker_class(tracker_class: Any) -> Any:
    """Register a tracker class under its name; return it."""
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ValueError(f"{tracker_class} must be a subclass of GeneralTracker")
    name = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not isinstance(getattr(tracker_class, "requires_logging_directory", None), bool):
        raise ValueError(f"{tracker_class.__name__} must define `name` (str) and `requires_logging_directory` (bool)")
    if name in LOGGER_TYPE_TO_CLASS and LOGGER_TYPE_TO_CLASS[name] is not tracker_class:
        warnings.warn(f"the tracker {name!r} is registered already and is replaced", UserWarning, stacklevel=2)
    LOGGER_TYPE_TO_CLASS[name] = tracker_class
    return tracker_class


def get_available_trackers() -> list[Any]:
    """Return the trackers whose package is installed."""
    return [LoggerType(name) for name in available_trackers() if name in LoggerType]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[Any]:
    """Return the trackers requested, without duplicates."""
    return choose_trackers(log_with, logging_dir)


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a tracker's method on the main process only, unless its `main_process_only` is False."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return call
