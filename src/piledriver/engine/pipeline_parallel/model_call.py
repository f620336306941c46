"""Call a pipeline like a model: `model(tokens, targets)` returns the loss sums, and `backward` works on their mean.

A schedule interleaves forwards and backwards of micro-batches, so gradients exist when the call returns; `backward` of
the loss only scales them, by one if the loss is the mean. So a loop written for one process runs on a pipeline. The
sums are those of all ranks: their mean is the loss of the full batch.
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
    """Make a call of the model run a full batch through all stages. Every rank of a pipeline calls it."""
    known = state_of(model)
    assert known is not None
    for stage in known.roots:
        # A stage is a shallow copy of the model: autocast must wrap the stage's own forward.
        around = stage.__dict__.pop("forward", None)
        if isinstance(around, AutocastForward):
            stage.forward = AutocastForward(stage.forward, around.context)
    known.pipeline = Pipeline(model, mesh, device=device)
    for name in _HOOKS:
        # The stages have these hooks too; around the schedule they would run twice.
        setattr(model, name, OrderedDict())
    model.forward = PipelinedForward(model)


class PipelinedForward:
    """The forward of a pipelined model. A copy of the model has no pipeline."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.factor: Callable[[], float] = _one
        """The expected factor of the mean loss in backward: loss scale, fraction of an accumulation window."""
        self.syncs = True

    def release(self) -> None:
        """Drop the reference to the accelerator."""
        self.factor = _one

    def __call__(self, inputs: Any = None, targets: Any = None, **context: Any) -> LossSums | Tensor:
        """Return the loss sums over all ranks; computes the gradients of their mean if gradients are enabled.

        The names of Hugging Face models work too: `model(input_ids=..., labels=...).loss`. With `reduction="none"`,
        return the loss of every target of this pipeline's batch.
        """
        known = None if self.model is None else state_of(self.model)
        if known is None or known.pipeline is None:
            raise UsageError("this copy of a model has no pipeline", fix="call the prepared model")
        inputs = context.pop("input_ids", None) if inputs is None else inputs
        targets = context.pop("labels", None) if targets is None else targets
        if inputs is None or targets is None:
            missing = "inputs" if inputs is None else "targets"
            raise UsageError(
                f"a pipelined model was called without {missing}",
                fix="call model(tokens, targets), or model(input_ids=..., labels=...)",
            )
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
    """Scales the gradients of the schedule to those of the value that backward was called on."""

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
