"""Trackers by name. Other packages add theirs through the entry-point group `piledriver.tracker`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from piledriver.core.errors import UsageError
from piledriver.core.registry import Registry

_HERE = "piledriver.observe.trackers"

TRACKERS: Registry[Any] = Registry(
    "tracker",
    {
        "jsonl": f"{_HERE}.jsonl:JsonlTracker",
        "tensorboard": f"{_HERE}.services.tensorboard:TensorBoardTracker",
        "wandb": f"{_HERE}.services.wandb:WandBTracker",
        "mlflow": f"{_HERE}.services.mlflow:MLflowTracker",
        "comet_ml": f"{_HERE}.services.comet_ml:CometMLTracker",
        "aim": f"{_HERE}.services.aim:AimTracker",
        "clearml": f"{_HERE}.services.clearml:ClearMLTracker",
        "dvclive": f"{_HERE}.services.dvclive:DVCLiveTracker",
        "swanlab": f"{_HERE}.services.wandb:SwanLabTracker",
        "trackio": f"{_HERE}.services.wandb:TrackioTracker",
    },
)


class MissingLoggingDirError(UsageError, ValueError):
    """A tracker writes files and no `logging_dir` is given."""


def available_trackers() -> list[str]:
    """Return the names whose package is installed; `jsonl` needs none."""
    needs_no_package = {"jsonl"}
    return [name for name in TRACKERS if name in needs_no_package or importlib.util.find_spec(name) is not None]


def choose_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the requested trackers as unique names and ready objects, checked before any of them starts.

    >>> choose_trackers(["jsonl", "jsonl"], "logs")
    ['jsonl']
    """
    if log_with is None:
        return []
    asked = list(log_with) if isinstance(log_with, list | tuple) else [log_with]
    if any(str(item) == "all" for item in asked):
        everything = [name for name in available_trackers() if name != "jsonl" or logging_dir is not None]
        asked = [item for item in asked if not isinstance(item, str) and str(item) != "all"] + everything
    chosen: list[Any] = []
    for item in asked:
        ready = hasattr(item, "store_init_configuration") and not isinstance(item, type)
        found = item if ready else str(getattr(item, "value", item)).lower()
        needs_folder = getattr(item if ready else TRACKERS[found], "requires_logging_directory", False)
        if needs_folder and not ready and logging_dir is None:
            raise MissingLoggingDirError(
                f"Logging with `{found}` requires a `logging_dir` to be passed in",
                fix="give project_dir or logging_dir",
            )
        if found not in chosen:
            chosen.append(found)
    return chosen


def make_trackers(
    chosen: Sequence[Any],
    project_name: str,
    logging_dir: str | os.PathLike[str] | None = None,
    init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Any]:
    """Create the trackers from `choose_trackers` without connecting; `init_kwargs` holds arguments by name."""
    made: list[Any] = []
    for item in chosen:
        if not isinstance(item, str):
            made.append(item)
            continue
        tracker_class = TRACKERS[item]
        folder = [logging_dir] if tracker_class.requires_logging_directory else []
        made.append(tracker_class(project_name, *folder, **(init_kwargs or {}).get(item, {})))
    return made
