"""Pipeline inference; ours comes with the engine."""

from __future__ import annotations

from typing import Any

from piledriver.accelerator.errors import OptionError


def prepare_pippy(*args: Any, **kwargs: Any) -> Any:
    """Not here: the engine's pipeline layout does this."""
    raise OptionError("prepare_pippy is not provided", fix="use the engine's pipeline layout when it is there")
