"""`profile_step`: call a function a few times under the profiler, and return its report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from piledriver.observe.profile.collect import StepProfiler
from piledriver.observe.profile.finish import finish_rank
from piledriver.observe.report.report import Report

_log = logging.getLogger(__name__)


def profile_step(
    step: Callable[[], Any],
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizers: Sequence[Any] = (),
    *,
    warm_up: int = 1,
    steps: int = 3,
    folder: str | None = None,
) -> Report:
    """Call a training step a few times under the profiler and return the report of this process.

    >>> linear = nn.Linear(8, 8)
    >>> report = profile_step(lambda: linear(__import__("torch").ones(4, 8)).sum().backward(), linear)
    >>> report.ranks[0].steps
    3
    """
    for _ in range(warm_up):
        step()
    models = {"model": model} if isinstance(model, nn.Module) else dict(model or {})
    profiler = StepProfiler(models, optimizers)
    try:
        with profiler:
            for _ in range(steps):
                step()
                profiler.step()
    except BaseException:
        write_failure(profiler, folder)
        raise
    report = Report.of([finish_rank(profiler, folder)], "profile")
    if folder is not None:
        report.save(folder)
    return report


def write_failure(profiler: StepProfiler, folder: str | None) -> Report | None:
    """Write the report of this rank after an error in the profiled block; without a folder, log it.

    Never raises: the error of the block is what the user must see. Returns None if nothing was recorded.
    """
    if not profiler.was_recorded:
        return None
    try:
        report = Report.of([finish_rank(profiler, folder)], "profile that ended in an error")
        if folder is not None:
            _log.error("the profile up to the error is in %s", report.save(folder))
        else:
            _log.error("%s", report.text())
        return report
    except Exception as error:
        _log.warning("no report of the failed profile: %s: %s", type(error).__name__, error)
        return None
