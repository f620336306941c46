"""A pipeline that is called like a model: `model(tokens, targets)` gives the loss sums, `backward` its gradients.

A schedule runs forwards and backwards of micro-batches in turns, so the gradients are there when the call returns;
what `backward` of the loss adds is a factor, which is one where the loss is the mean that everybody takes. So a loop
that was written for one process runs on a pipeline as it is. The sums are those of all processes: their mean is the
loss of the whole batch on every rank.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.core.errors import UsageError
from piledriver.engine.errors import EngineError
from piledriver.engine.mesh import Mesh
from piledriver.engine.pipeline_parallel.runner import Pipeline
from piledriver.engine.precision import AutocastForward
from piledriver.engine.state import gradients_so_far, state_of
from piledriver.models.loss import LossSums
from piledriver.optim.shards import local

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


def call_as_pipeline(model: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """From now on a call of the model runs a whole batch through all stages. Every rank of a pipeline calls it."""
    known = state_of(model)
    assert known is not None
    for stage in known.roots:
        # A stage is a shallow copy: what was put around the model's forward goes around its own.
        around = stage.__dict__.pop("forward", None)
        if isinstance(around, AutocastForward):
            stage.forward = AutocastForward(stage.forward, around.context)
    known.pipeline = Pipeline(model, mesh, device=device)
    for name in _HOOKS:
        # They belong to the stages, which have them too; around the schedule they would run twice.
        setattr(model, name, OrderedDict())
    model.forward = PipelinedForward(model)


class PipelinedForward:
    """The call. A copy of the model has no pipeline."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.factor: Callable[[], float] = _one
        """What the mean loss is expected to be multiplied by before backward: loss scale, share of a window."""
        self.syncs = True

    def release(self) -> None:
        """Hold nothing of who prepared the model."""
        self.factor = _one

    def __call__(self, inputs: Any, targets: Any = None, **context: Any) -> LossSums | Tensor:
        """The sums over all processes, with gradients of their mean where they are on.

        With `reduction="none"`: the loss of every target of this pipeline's batch, on all of its ranks.
        """
        known = None if self.model is None else state_of(self.model)
        if known is None or known.pipeline is None:
            raise UsageError("this copy of a model is in no pipeline", fix="use the one that was prepared")
        if targets is None:
            targets = context.pop("labels", None)
        if targets is None:
            raise UsageError("a pipeline computes losses, and was given no targets", fix="call model(tokens, targets)")
        loss_fn = context.pop("loss_fn", None)
        sums: LossSums
        if context.get("reduction") == "none":
            return known.pipeline.token_losses(inputs, targets, context=context)  # type: ignore[no-any-return]
        if not torch.is_grad_enabled():
            sums = known.pipeline.evaluate(inputs, targets, loss_fn=loss_fn, context=context)
            return sums
        expected = float(self.factor())
        assert self.model is not None
        fresh = not any(True for _ in gradients_so_far(self.model))
        sums = known.pipeline.step(inputs, targets, loss_fn=loss_fn, context=context, scale=expected, sync=self.syncs)
        correction = _Correction(self.model, expected, float(sums.tokens), fresh)
        total = _Total.apply(sums.total.float().requires_grad_(), correction)  # type: ignore[no-untyped-call]
        return sums._replace(total=total)

    def __deepcopy__(self, memo: Any) -> PipelinedForward:
        return PipelinedForward(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return PipelinedForward, (None,)


def _one() -> float:
    return 1.0


class _Correction:
    """From the gradients that the schedule left to those of what backward was called on."""

    def __init__(self, model: nn.Module, expected: float, tokens: float, fresh: bool) -> None:
        self.model, self.expected, self.tokens, self.fresh = model, expected, tokens, fresh

    @torch.no_grad()
    def __call__(self, upstream: float) -> None:
        factor = upstream * self.tokens / self.expected
        if math.isclose(factor, 1.0, rel_tol=1e-5):
            return
        if not self.fresh:
            raise EngineError(
                f"backward of {factor:g} times the mean loss, where gradients are being accumulated",
                fix="call accelerator.backward(sums.total / sums.tokens) inside accelerator.accumulate",
            )
        for gradient in gradients_so_far(self.model):
            local(gradient).mul_(factor)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, correction: _Correction) -> Tensor:
        ctx.correction = correction
        return total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.correction(float(gradient))
        return None, None
