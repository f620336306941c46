"""`accelerate.inference`: rejected with the layout to use instead."""

from __future__ import annotations

from typing import Any

from piledriver.accelerator.errors import OptionError


def prepare_pippy(*args: Any, **kwargs: Any) -> Any:
    """Raise `OptionError`: a layout with `pp` runs a model as a pipeline."""
    raise OptionError("prepare_pippy is not provided", fix="use Accelerator(layout=Layout(pp=...))")
