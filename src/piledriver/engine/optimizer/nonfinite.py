"""Detect a loss or gradient that is not finite, and name the parameter and rank.

Only the global gradient norm, which clipping computes anyway, is checked in each step; single gradients are checked and
compared across ranks once that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from piledriver.engine.errors import EngineError
from piledriver.optim.shards import local


class NonFiniteError(EngineError):
    """A loss or a gradient is infinite or not a number."""


def check_finite(
    models: Iterable[nn.Module],
    norm: Tensor | float,
    *,
    loss: Tensor | float | None = None,
    step: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise `NonFiniteError` if the global gradient norm is not finite, naming parameters and losses.

    All ranks call it with the same norm, so all raise together.
    """
    value = float(norm)
    if math.isfinite(value):
        return
    where = describe_non_finite(models, group, loss=loss)
    at = "" if step is None else f" in step {step}"
    raise NonFiniteError(
        f"the gradient norm is {value}{at}{where}", fix="look at that batch, or lower the learning rate"
    )


def describe_non_finite(
    models: Iterable[nn.Module], group: dist.ProcessGroup | None = None, *, loss: Tensor | float | None = None
) -> str:
    """Return which losses and parameters are not finite, as the end of a sentence. Collective over the group."""
    here = [found for found in (_loss(loss), _parameter(models)) if found]
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return f": {', '.join(here)}" if here else ""
    answers: list[tuple[int, list[str]]] = [(0, [])] * dist.get_world_size(group)
    dist.all_gather_object(answers, (dist.get_rank(), here), group=group)
    blamed = [f"rank {rank}: {', '.join(found)}" for rank, found in answers if found]
    return f" ({'; '.join(blamed)})" if blamed else ""


def _loss(loss: Tensor | float | None) -> str | None:
    return None if loss is None or math.isfinite(float(loss)) else f"loss {float(loss)}"


@torch.no_grad()
def _parameter(models: Iterable[nn.Module]) -> str | None:
    """Describe the local gradients that are not finite, naming the last one, which the backward reached first."""
    bad = [
        (name, part)
        for model in models
        for name, parameter in model.named_parameters()
        for part in _gradient(parameter)
        if not bool(part.isfinite().all())
    ]
    if not bad:
        return None
    name, part = bad[-1]
    count = int((~part.isfinite()).sum())
    others = f" and of {len(bad) - 1} others" if len(bad) > 1 else ""
    return f"{count} of {part.numel()} numbers in the gradient of {name}{others}"


def _gradient(parameter: Tensor) -> list[Tensor]:
    """Return the local gradient of a parameter or of its optimizer shard."""
    for one in (parameter, getattr(parameter, "optimizer_shard", None)):
        if one is not None and one.grad is not None:
            return [local(one.grad)]
    return []
