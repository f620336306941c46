"""The Accelerator's verbs around a step: accumulate, backward, unscale, clip, and their contexts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from piledriver.accelerator.errors import NotPreparedError, OptionError
from piledriver.accelerator.options.handlers import AutocastKwargs, ProfileKwargs
from piledriver.accelerator.state.accumulation import Count, GradientState, ItemMean
from piledriver.accelerator.state.properties import AcceleratorProperties
from piledriver.core.errors import UsageError
from piledriver.data.loaders.prepare import override_even_batches
from piledriver.engine import state as engine_state
from piledriver.engine.faults.failed_step import reset_after_failure
from piledriver.engine.faults.lost_ranks import report_lost_ranks
from piledriver.engine.optimizer.clip import clip_grad_norm, clip_grad_value
from piledriver.engine.precision import autocast
from piledriver.runtime.collectives.agreement import check_agreement

_log = logging.getLogger(__name__)


class GradientsMixin(AcceleratorProperties):
    """From a loss to gradients that are averaged, unscaled and clipped."""

    gradient_state: GradientState
    scaler: Any
    autocast_handler: AutocastKwargs
    profile_handler: ProfileKwargs | None
    _item_mean: ItemMean
    _joins_uneven_inputs = False
    _last_loss: torch.Tensor | None
    _backwards: int

    @property
    def sync_gradients(self) -> bool:
        """Return whether a window ends with this batch: gradients are averaged and the optimizer steps."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return the batches per window."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin_kwargs["num_steps"] = steps

    @property
    def step(self) -> int:
        """Return the batches since the last loader's end."""
        return self.gradient_state.step

    @step.setter
    def step(self, step: int) -> None:
        self.gradient_state.step = step

    @contextmanager
    def accumulate(self, *models: nn.Module, count: Count | None = None) -> Iterator[None]:
        """Run one batch of a window: gradients stay local until the window ends, then are averaged over ranks.

        `count` is the number of items (tokens, samples) that the loss is the mean of. With it the window's gradient is
        the mean over every item of every rank; without it batches weigh alike, as in Accelerate.
        """
        state, before = self.gradient_state, self._item_mean.standing
        window = state.step, state.sync_gradients
        try:
            with self._batch_of_window(models, count):
                yield
        except Exception:
            # A failed batch does not count: the next one takes its place in the window.
            state.step, state.sync_gradients = window
            self._item_mean.go_back_to(before, self._gathered(models))
            raise

    @contextmanager
    def _batch_of_window(self, models: tuple[nn.Module, ...], count: Count | None) -> Iterator[None]:
        if count is not None and self._joins_uneven_inputs:
            raise UsageError(
                "accumulate(count=...) sums counts over all ranks, and a rank that ran out of data does not take part",
                fix="leave count out within join_uneven_inputs, or give every rank the same number of batches",
            )
        ends = self.gradient_state.next_batch()
        if count is not None or self._item_mean.batch_weight is not None:
            self._item_mean.begin_batch(
                count,
                ends,
                gradients=self._gathered(models),
                add_up=self.mesh.sum_over_data,
                reduce_size=self.mesh.reduce_size,
                loss_is_of_all=self.layout.pp > 1,
                device=self.device,
            )
        if ends or self.gradient_state.sync_each_batch or not self.world.is_distributed:
            yield
            return
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(self.no_sync(model))
            yield

    def _gathered(self, models: tuple[nn.Module, ...]) -> Iterator[torch.Tensor]:
        """Yield the gradients of the window so far."""
        return (one for model in models or self._models for one in engine_state.window_gradients(model))

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep gradients local within the block."""
        with engine_state.no_sync(model):
            yield

    @contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Average gradients in this backward although the forward ran inside `no_sync`."""
        with engine_state.sync_in_backward(model):
            yield

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Weigh the loss for its window, scale it for fp16, and compute gradients."""
        if not self._models and (self.world.is_distributed or not self._optimizers):
            raise NotPreparedError(
                "backward was called before any model was prepared", fix="call accelerator.prepare(model, ...) first"
            )
        if self._backwards == 0:
            self._warn_unprepared_optimizers()
        self._last_loss = loss.detach() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
        self._backwards += 1
        if self.world.debug or self.layout.debug:
            check_agreement(self.world.with_debug(), f"backward number {self._backwards}", self._last_loss)
        loss = self._item_mean.weigh(loss, self.gradient_state.num_steps)
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        try:
            if not self.world.is_distributed:
                loss.backward(**kwargs)
                return
            with report_lost_ranks(f"averaging gradients in backward number {self._backwards}"):
                loss.backward(**kwargs)
        except Exception:
            for model in self._models:
                reset_after_failure(model)
            raise

    def _warn_unprepared_optimizers(self) -> None:
        """Warn once of optimizers whose steps would change nothing, or each rank's weights differently."""
        # On one process, in fp32 or mixed precision, the parameters stay those that the user's optimizer holds.
        layout = self.layout
        own = self.mesh.alone and layout.offload == "none" and not layout.precision.endswith("pure")
        if layout.reducer != "ddp" and not own and self._models and not self._optimizers:
            _log.warning(
                "no optimizer was prepared: one that was made before does not see the parameters that %r put in place "
                "of the model's. Fix: pass it to accelerator.prepare",
                self.layout,
            )
        if self.mesh.alone or self.layout.zero == 3:
            # With zero 3 a model shows gathered parameters after its forward, which no optimizer holds.
            return
        known = {
            id(one)
            for model in self._models
            for p in model.parameters()
            for one in (p, getattr(p, "optimizer_shard", p))
        }
        groups = [group for one in self._optimizers for group in one.param_groups]
        strange = [p for group in groups for p in group["params"] if p.requires_grad and id(p) not in known]
        if strange:
            _log.warning(
                "optimizers hold %d parameters of no prepared model, the first of shape %s: their gradients are not "
                "averaged over processes. Fix: prepare the module that they belong to",
                len(strange),
                tuple(strange[0].shape),
            )

    def _loss_factor(self) -> float:
        """Return what a loss will be multiplied by before backward, which pipelines need beforehand."""
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        return float(self._item_mean.weight(self.gradient_state.num_steps)) * scale

    def lomo_backward(self, loss: Any, learning_rate: float) -> None:
        """Reject LOMO, which fuses the step into backward and leaves nothing to average or to clip."""
        raise OptionError("LOMO's fused backward is not supported", fix="use backward and optimizer.step")

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the scaling of fp16 gradients, once per step; clipping does it by itself."""
        if self.scaler is None:
            return
        wanted = self._optimizers if optimizer is None else optimizer
        for one in wanted if isinstance(wanted, (list, tuple)) else [wanted]:
            inner = getattr(one, "optimizer", one)
            if not self.scaler.is_unscaled(inner):
                self.scaler.unscale_(inner)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clip the norm of all gradients together, over every rank and axis that holds a shard of them.

        With `error_if_nonfinite` a non-finite norm stops all ranks, naming the rank that it came from.
        """
        self.unscale_gradients()
        norm = clip_grad_norm(parameters, max_norm, norm_type, self.mesh)
        if error_if_nonfinite:
            from piledriver.engine.optimizer.nonfinite import check_finite

            check_finite(self._models, norm, loss=self._last_loss)
        return norm

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient's values."""
        self.unscale_gradients()
        clip_grad_value(parameters, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether any optimizer's last step was skipped because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Train until the last rank runs out of data; ranks that ran out before shadow the others' collectives."""
        if self.mesh.alone:
            yield
            return
        from piledriver.engine.data_parallel.join import join_uneven_inputs

        self._joins_uneven_inputs = True
        try:
            with override_even_batches(self._dataloaders, even_batches), join_uneven_inputs(joinables):
                yield
        finally:
            self._joins_uneven_inputs = False

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Compute in this run's precision within the block."""
        with autocast(self.layout, self.device.type, (autocast_handler or self.autocast_handler).to_dict()):
            yield

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Profile the block: torch's profiler, whose `report` tells afterwards where time and memory of all ranks went.

        With a handler, its options apply as in Accelerate, and its `report` says whether a report is made. Reports and
        traces go to `output_trace_dir`, or to `profile` in the project folder.
        """
        from piledriver.accelerator.profiling import FULL, accelerator_regions, profiled

        options = profile_handler or self.profile_handler or FULL
        folder = options.output_trace_dir or (self.project_dir and os.path.join(self.project_dir, "profile"))
        regions = accelerator_regions(type(self))
        with profiled(
            self.world, options, self._models, self._optimizers, folder=folder or None, functions=regions
        ) as profiler:
            yield profiler

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """Do nothing: with `Layout(cp=...)` a prepared model shards its own sequences."""
        yield
