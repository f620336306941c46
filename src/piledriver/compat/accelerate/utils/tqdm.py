"""`accelerate.utils.tqdm`: a progress bar on the main process only."""

from __future__ import annotations

import importlib
from typing import Any

from piledriver.compat.accelerate.state import PartialState
from piledriver.core.errors import MissingDependencyError


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a bar of tqdm, disabled on other ranks."""
    try:
        bar = importlib.import_module("tqdm.auto").tqdm
    except ImportError:
        raise MissingDependencyError("tqdm", extra="dev", purpose="this progress bar") from None
    disable = kwargs.pop("disable", False) or (main_process_only and not PartialState().is_local_main_process)
    return bar(*args, **kwargs, disable=disable)
