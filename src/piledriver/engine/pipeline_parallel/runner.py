"""Run full batches through a pipeline: forward, backward, and one loss on every rank.

The loss of a batch is the mean over the targets of all ranks: micro-batches weigh by their number of targets, and sums
are divided once. So gradients equal those of one process with the full batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from piledriver.core.errors import UsageError
from piledriver.engine.errors import EngineError
from piledriver.engine.faults.lost_ranks import report_lost_ranks
from piledriver.engine.faults.same_batch import check_same_batch
from piledriver.engine.layout import SPLIT_BACKWARD
from piledriver.engine.mesh import Mesh
from piledriver.engine.offload import offloaded
from piledriver.engine.pipeline_parallel.forward_only import Forward, run_forward
from piledriver.engine.pipeline_parallel.infer_shapes import Meta, StageOutOfMemoryError, find_shapes
from piledriver.engine.pipeline_parallel.losses import Losses, LossFunction, TokenLosses
from piledriver.engine.pipeline_parallel.microbatches import MicroBatch, split_microbatches
from piledriver.engine.pipeline_parallel.schedules import microbatches_of, rank_of_stage, schedule_class
from piledriver.engine.pipeline_parallel.split import made_stages, pipeline_split
from piledriver.engine.pipeline_parallel.stages.stage import Keywords, ScheduledStage
from piledriver.engine.pipeline_parallel.tied_weights import TiedWeightSync
from piledriver.engine.state import state_of
from piledriver.models import Transformer
from piledriver.models.loss import LossSums

# Number of batch shapes whose schedules, with their receive buffers, are kept.
KEPT_SHAPES = 4

RESUME_FIX = "resume from a checkpoint in new processes, with smaller batches or more microbatches"
"""The fix after a rank failed inside a schedule, while others wait for it."""

SETTINGS = ("z_loss", "chunk_tokens")
"""Attributes of our `Transformer` that may change between batches."""


class Pipeline:
    """This rank's stages of a model, and the schedule that runs them."""

    def __init__(self, model: nn.Module, mesh: Mesh, *, device: torch.device) -> None:
        known = pipeline_split(model)
        if known is None:
            raise UsageError("the model was not split into stages", fix="prepare it with Layout(pp=2) or more")
        self.model, self.mesh, self.layout, self.device = model, mesh, mesh.layout, device
        self.kind = known.chain.kind
        self.stages = dict(zip(known.stages, made_stages(model), strict=True))
        self.microbatches = microbatches_of(self.layout)
        self.tied = TiedWeightSync(model, self.stages, mesh, self.layout)
        self.tied.materialise(device)
        if (home := offloaded(model)) is not None:
            self.tied.cast(home.dtype)
        if self.layout.schedule in SPLIT_BACKWARD:
            _keep_gathered(self.stages.values())
        self.rank_of = [rank_of_stage(self.layout, stage) for stage in range(self.layout.stages)]
        self._found: dict[Any, list[tuple[Meta, ...]]] = {}
        self._built: dict[Any, tuple[Any, list[ScheduledStage]]] = {}
        self._losses: Losses | None = None
        self._window_open = False
        self._failure: str | None = None

    def step(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        targets: Any,
        *,
        loss_fn: LossFunction | None = None,
        context: Mapping[str, Any] | None = None,
        divisor: Tensor | float | None = None,
        scale: Tensor | float = 1.0,
        sync: bool = True,
    ) -> LossSums:
        """Run forward and backward of a batch, accumulating gradients. See `run_batch`."""
        self._check_in_step()
        reducer = getattr(state_of(self.model), "reducer", None)
        with report_lost_ranks("a pipeline step", self.mesh.pp.get_group()):
            losses = self._prepare(inputs, targets, loss_fn, context)
            # A batch without targets leaves no gradient instead of NaN.
            losses.divide_by(losses.weight.clamp(min=1.0) if divisor is None else divisor, scale)
            if not self._window_open:
                self._send_weights()
            schedule = self._schedule(losses)
            with self._in_step():
                self._window_open = not sync
                with reducer.off() if reducer is not None else nullcontext():
                    self._train(losses, *schedule, sync=sync)
                if sync:
                    self.tied.return_gradients()
                    if reducer is not None:
                        reducer.synchronise()
                    if (home := offloaded(self.model)) is not None:
                        home.gradients.collect()
                return losses.all_reduce(self.mesh)

    @torch.no_grad()
    def evaluate(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        targets: Any,
        *,
        loss_fn: LossFunction | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> LossSums:
        """Return the loss sums of a batch, forward only."""
        self._check_in_step()
        with report_lost_ranks("a pipeline's evaluation", self.mesh.pp.get_group()):
            losses = self._prepare(inputs, targets, loss_fn, context)
            self._send_weights()
            self._shapes(losses)
            with self._in_step():
                self._forward(losses)
                return losses.all_reduce(self.mesh)

    @torch.no_grad()
    def token_losses(self, inputs: Tensor, targets: Tensor, *, context: Mapping[str, Any]) -> Tensor:
        """Return the loss of every target, [batch, time] in fp32, on every rank of this pipeline; forward only."""
        self._check_in_step()
        if self.kind != "transformer":
            raise UsageError(
                f"a pipeline of a {type(self.model).__name__} has no per-token losses", fix="use our Transformer"
            )
        group = self.mesh.pp.get_group()
        with report_lost_ranks("a pipeline's evaluation", group):
            self._copy_settings()
            losses = TokenLosses(split_microbatches(inputs, targets, context, self.microbatches), targets, self.device)
            self._send_weights()
            self._shapes(losses)
            with self._in_step():
                self._forward(losses)
                return losses.all_reduce(group)

    def _send_weights(self) -> None:
        """Send master weights that were loaded to the device, and tied weights to the last stage."""
        if (home := offloaded(self.model)) is not None:
            home.send(only_stale=True)
        self.tied.send_weights()

    def _check_in_step(self) -> None:
        if self._failure is not None:
            raise EngineError(
                f"a batch failed inside the pipeline schedule, so its ranks are out of step: {self._failure}",
                fix=RESUME_FIX,
            )

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Record a failure inside a schedule: the ranks are out of step after it."""
        try:
            yield
        except Exception as error:
            # torch wraps the error of a stage.
            cause = error.__cause__ or error
            self._failure = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
            if isinstance(cause, torch.OutOfMemoryError):
                raise StageOutOfMemoryError(self._failure, fix=RESUME_FIX) from error
            raise

    def _prepare(self, inputs: Any, targets: Any, loss_fn: LossFunction | None, context: Any) -> Losses:
        own = self.kind == "transformer" and loss_fn is None
        if self.kind in ("sequential", "traced"):
            name = type(self.model).__name__
            if loss_fn is None:
                raise UsageError(f"a pipeline of a {name} has no loss of its own", fix="give loss_fn")
            if context:
                raise UsageError(f"stages of a {name} take no {next(iter(context))!r}", fix="leave it out")
        self._copy_settings()
        if self.layout.debug:
            check_same_batch((inputs, targets), self.mesh.pp)
        cut = split_microbatches(inputs, targets, dict(context or {}), self.microbatches)
        if isinstance(self.model, Transformer) and self.model.config.moe and cut[-1].rows != cut[0].rows:
            rows, parts = sum(part.rows for part in cut), self.microbatches
            raise EngineError(
                f"{rows} rows cannot be split into {parts} equal micro-batches, and experts would count padding",
                fix=f"give {max(rows // parts, 1) * parts} rows, or change microbatches",
            )
        return Losses(cut, loss_fn, own=own, mesh=self.mesh, device=self.device)

    def _copy_settings(self) -> None:
        """Copy loss settings of the model to its stages, which are shallow copies."""
        settings = {name: vars(self.model)[name] for name in SETTINGS if name in vars(self.model)}
        for stage in self.stages.values():
            vars(stage).update(settings)

    def _train(self, losses: Losses, schedule: Any, stages: list[ScheduledStage], *, sync: bool) -> None:
        self._losses = losses
        for stage in stages:
            stage.microbatches, stage.reduces = losses.microbatches, sync
        try:
            # torch splits this into micro-batch indices, by which `_loss` finds the targets.
            schedule.step(target=torch.arange(self.microbatches), return_outputs=False)
        finally:
            self._losses = None
            for stage in stages:
                stage.microbatches = []
                stage.clear_runtime_states()

    def _forward(self, losses: Losses | TokenLosses) -> None:
        keywords, last = self._keywords_of(losses.own), self.layout.stages - 1
        run_forward(
            {number: _with_keywords(module, keywords, number == last) for number, module in self.stages.items()},
            losses.microbatches,
            self._shapes(losses),
            self.rank_of,
            group=self.mesh.pp.get_group(),
            device=self.device,
            finish=losses.of,
        )
        for stage in self.stages.values():
            _reshard(stage)

    def _shapes(self, losses: Losses | TokenLosses) -> list[tuple[Meta, ...]]:
        """Return the outputs of every stage for batches of this shape."""
        first, last = losses.microbatches[0], self.layout.stages - 1
        key = (type(losses), losses.own, _shape_key(first))
        if key not in self._found:
            keywords = self._keywords_of(losses.own)
            runs = {number: _with_keywords(m, keywords, number == last) for number, m in self.stages.items()}
            self._found[key] = find_shapes(self.stages, runs, self.rank_of, first, self.mesh.pp, self.device)
        return self._found[key]

    def _schedule(self, losses: Losses) -> tuple[Any, list[ScheduledStage]]:
        key = (losses.own, _shape_key(losses.microbatches[0]))
        if key not in self._built:
            while len(self._built) >= KEPT_SHAPES:
                del self._built[next(iter(self._built))]
            self._built[key] = self._build(losses)
        return self._built[key]

    def _build(self, losses: Losses) -> tuple[Any, list[ScheduledStage]]:
        outputs = self._shapes(losses)
        inputs = [tuple(Meta.of(tensor) for tensor in losses.microbatches[0].inputs), *outputs]
        stages = [
            ScheduledStage(
                module,
                number,
                self.layout.stages,
                device=self.device,
                inputs=inputs[number],
                outputs=outputs[number],
                keywords=self._keywords_of(losses.own),
                # A split backward would recompute twice, which torch's selective checkpointing rejects.
                splits_backward=self.layout.activations == "keep",
                group=self.mesh.pp.get_group(),
            )
            for number, module in self.stages.items()
        ]
        one = self.layout.schedule in ("gpipe", "1f1b")
        # Losses are divided once, not by torch per micro-batch.
        schedule = schedule_class(self.layout.schedule)(
            stages[0] if one else stages, self.microbatches, loss_fn=self._loss, scale_grads=False
        )
        return schedule, stages

    def _loss(self, output: Any, number: Tensor) -> Tensor:
        assert self._losses is not None
        return self._losses.of(output, int(number))

    def _keywords_of(self, own: bool) -> Keywords:
        def keywords(micro: MicroBatch, last: bool) -> dict[str, Any]:
            named = dict(micro.context)
            if self.kind == "transformer":
                named["time"] = micro.inputs[0].shape[1]
                if own and last:
                    named["targets"] = micro.padded_targets()
            return named

        return keywords


def run_batch(
    pipeline: Pipeline,
    inputs: Tensor | tuple[Tensor, ...],
    targets: Any,
    loss_fn: LossFunction | None = None,
    *,
    context: Mapping[str, Any] | None = None,
    divisor: Tensor | float | None = None,
    scale: Tensor | float = 1.0,
    sync: bool = True,
) -> Tensor:
    """Run forward and backward of a full batch; return the mean loss over the targets of all ranks.

    Every rank of a pipeline passes the same inputs and targets. `loss_fn(output, targets)` returns a mean over targets
    that are not -100 (over rows, if they are not integers), or `LossSums`; None: the loss of our models, or Hugging
    Face's shifted one. `context` holds keyword arguments of every stage (document_ids; attention_mask). To accumulate
    over several batches, pass the targets of all of them as `divisor`, and sync=False for all but the last. `scale`
    multiplies gradients, not the result (loss scaling).
    """
    sums = pipeline.step(inputs, targets, loss_fn=loss_fn, context=context, divisor=divisor, scale=scale, sync=sync)
    return (sums.total / sums.tokens).float()


def evaluate_batch(
    pipeline: Pipeline,
    inputs: Tensor | tuple[Tensor, ...],
    targets: Any,
    loss_fn: LossFunction | None = None,
    *,
    context: Mapping[str, Any] | None = None,
) -> Tensor:
    """Return the mean loss of a batch over all ranks, forward only."""
    sums = pipeline.evaluate(inputs, targets, loss_fn=loss_fn, context=context)
    return (sums.total / sums.tokens).float()


def _with_keywords(module: nn.Module, keywords: Keywords, last: bool) -> Forward:
    return lambda inputs, micro: module(*inputs, **keywords(micro, last))


def _shape_key(micro: MicroBatch) -> Any:
    named = {name: value for name, value in micro.context.items() if isinstance(value, Tensor)}
    tensors = [*enumerate(micro.inputs), *named.items()]
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)


def _keep_gathered(stages: Iterable[nn.Module]) -> None:
    """With zero 3 and a split backward, gather a stage once per batch, not block by block.

    The weight-gradient part needs parameters that a forward in between would have resharded.
    """
    for stage in stages:
        for part in stage.modules():
            if isinstance(part, FSDPModule):
                part.set_reshard_after_forward(False, recurse=False)


def _reshard(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
