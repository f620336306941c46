"""Schedules: functions from a step count to a value. The step may be a tensor, so that a compiled step contains one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.core.schedules import decayed, fraction_done

Schedule = Callable[[Tensor], Tensor]


def constant_schedule(value: float) -> Schedule:
    """Return a schedule of one value."""
    return lambda step: torch.full_like(_float(step), value)


def linear_schedule(start: float, end: float, steps: int) -> Schedule:
    """Return a schedule from start to end over `steps`, then end."""
    return lambda step: start + (end - start) * fraction_done(_float(step), 0, steps)


def cosine_schedule(start: float, steps: int, end: float = 0.0) -> Schedule:
    """Return a schedule of half a cosine from start to end over `steps`, then end."""
    return lambda step: end + (start - end) * decayed("cosine", fraction_done(_float(step), 0, steps))


def exponential_schedule(start: float, rate: float, every: int = 1) -> Schedule:
    """Return a schedule that is multiplied by `rate` every `every` steps, smoothly."""
    return lambda step: start * torch.pow(torch.full_like(_float(step), rate), _float(step) / every)


def joined_schedule(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Return one schedule after another; each counts from its own start."""
    if len(boundaries) != len(schedules) - 1:
        raise UsageError(
            f"{len(schedules)} schedules with {len(boundaries)} boundaries", fix="give one boundary between each two"
        )

    def schedule(step: Tensor) -> Tensor:
        value = schedules[0](step)
        for boundary, later in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(torch.as_tensor(step) < boundary, value, later(step - boundary))
        return value

    return schedule


def warmup_cosine_schedule(peak: float, warmup: int, steps: int, end: float = 0.0) -> Schedule:
    """Return a linear warm-up from 0 to the peak, then half a cosine to the end; `steps` includes the warm-up."""
    return joined_schedule([linear_schedule(0.0, peak, warmup), cosine_schedule(peak, steps - warmup, end)], [warmup])


def warmup_stable_decay_schedule(peak: float, warmup: int, steps: int, decay: int, end: float = 0.0) -> Schedule:
    """Return a linear warm-up, a plateau, and a linear decay over the last `decay` of `steps`."""
    parts = [linear_schedule(0.0, peak, warmup), constant_schedule(peak), linear_schedule(peak, end, decay)]
    return joined_schedule(parts, [warmup, steps - decay])


def _float(step: Tensor) -> Tensor:
    return torch.as_tensor(step).to(torch.float32)
