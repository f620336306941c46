"""`profile_step`: call a function a few times under the profiler, and return its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from piledriver.observe.profile.collect import StepProfiler
from piledriver.observe.profile.finish import finish_rank
from piledriver.observe.report.report import Report


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
    finally:
        # An out-of-memory error ends the block: the same report is written, and the error continues.
        report = Report.of([finish_rank(profiler, folder)], "profile")
        if folder is not None:
            report.save(folder)
    return report
