"""`accelerate.utils.launch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piledriver.runtime import environment


class PrepareForLaunch:
    """A function that sets its rank before it runs, for launchers that pass an index only."""

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = distributed_type
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Run the function as rank `index`."""
        environment.update({"LOCAL_RANK": str(index), "RANK": str(index), "FORK_LAUNCHED": "1"})
        self.launcher(*args)
