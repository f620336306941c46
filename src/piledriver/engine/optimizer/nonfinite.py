"""A loss or gradient that is not finite is seen in the step where it happens, and named: which parameter, which rank.

The watch looks at the gradient norm, which clipping computes anyway and which is the same on every process; only when
that is not finite does it look at each gradient and ask the other processes. So it costs one number per step.
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
    """Raise where the global gradient norm is not finite, naming the parameters and losses to blame.

    All processes call it with the same norm, so all raise together and none waits for another.
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
    """Who is to blame, as the end of a sentence; every process of the group must ask, all get the same answer."""
    mine = [found for found in (_loss(loss), _parameter(models)) if found]
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return f": {', '.join(mine)}" if mine else ""
    answers: list[tuple[int, list[str]]] = [(0, [])] * dist.get_world_size(group)
    dist.all_gather_object(answers, (dist.get_rank(), mine), group=group)
    blamed = [f"rank {rank}: {', '.join(found)}" for rank, found in answers if found]
    return f" ({'; '.join(blamed)})" if blamed else ""


def _loss(loss: Tensor | float | None) -> str | None:
    return None if loss is None or math.isfinite(float(loss)) else f"loss {float(loss)}"


@torch.no_grad()
def _parameter(models: Iterable[nn.Module]) -> str | None:
    """The parameters whose gradient here is not finite: the last one in the model, which the backward met first."""
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
    """The local gradient, of the part that the optimizer steps on where the parameter has none."""
    for one in (parameter, getattr(parameter, "optimizer_shard", None)):
        if one is not None and one.grad is not None:
            return [local(one.grad)]
    return []
