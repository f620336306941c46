"""One optimizer step on the mean loss over every token of the global batch, with the update skipped on a spike.

The whole step is enqueued on the device: loss, gradient norm, spike verdict and update follow each other there, and the
host reads the values when the next step is enqueued. Only what needs the verdict at once waits for it: actions `stop`
and `rollback`, the gradient scaler of fp16, and optimizers that cannot skip an update on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from piledriver.core.errors import PiledriverError
from piledriver.data.stream.loader import TokenBatch
from piledriver.models import Transformer, make_masks
from piledriver.optim import can_skip_on_device, capabilities, clip_in_step, step_unless
from piledriver.train.deferred import DeferredScalars
from piledriver.train.objective import KeptZeros, Objective, check_keeps_zeros
from piledriver.train.position import Position
from piledriver.train.setup import RunComponents
from piledriver.train.spikes.detect import SpikeWatch


class StopSaveVote(NamedTuple):
    """A rank's vote to stop or to save after a step; every rank does so if one votes for it."""

    stop: bool = False
    save: bool = False


class Result(NamedTuple):
    """The values of one step."""

    loss: float
    norm: float
    broken: bool
    """The loss is a spike, or the gradient is not finite."""
    skipped: bool
    """The update was skipped."""
    skipped_updates: int
    """Updates skipped so far, this one included."""
    vote: StopSaveVote
    """Votes of all ranks at the start of the step."""


class PendingStep:
    """A step that is enqueued on the device."""

    def __init__(self, reading: DeferredScalars) -> None:
        self.reading = reading

    def result(self) -> Result:
        """Wait for the device and return the values of the step."""
        loss, norm, broken, skipped, skipped_updates, stop, save = self.reading.read()
        return Result(loss, norm, bool(broken), bool(skipped), int(skipped_updates), StopSaveVote(stop > 0, save > 0))


class TrainStep:
    """Runs optimizer steps of a prepared model."""

    def __init__(
        self,
        components: RunComponents,
        model: Transformer,
        optimizer: Any,
        scheduler: Any,
        position: Position,
        objective: Objective | None = None,
    ) -> None:
        self._components, self._position = components, position
        self._accelerator, self._spikes = components.accelerator, components.config.spikes
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.watch = SpikeWatch(components.config.spikes, components.device)
        self.waits = self._has_to_wait()
        self._objective = objective or Objective()
        self._zeros: KeptZeros | None = None
        if components.config.keep_zeros:
            folder, offloads = components.config.model_folder, components.layout.offloads
            check_keeps_zeros(optimizer.optimizer, offloads=offloads, folder=folder)
            self._zeros = KeptZeros(model)
        alone = not components.world.is_distributed and not components.layout.offloads
        self._clips_in_step = capabilities(optimizer).clips_in_step and alone

    def _has_to_wait(self) -> bool:
        """Return whether the host needs the verdict of a step before the next one."""
        if self._accelerator.scaler is not None or self._spikes.stops or self._spikes.rolls_back:
            return True
        return self._spikes.skips_update and not can_skip_on_device(self.optimizer, self._components.device)

    def run(self, step: int, vote: StopSaveVote) -> PendingStep:
        """Run one step; a broken one is handled as `spikes.action` says. The vote is reduced with its loss."""
        loss, norm, votes = self._gradients(vote)
        # Overflows of scaled gradients are the scaler's task; without a scaler they are broken steps.
        broken = self.watch.judge(step, loss, norm if self._accelerator.scaler is None else None)
        if self.waits:
            skipped = self._update_by_verdict(step, bool(broken), loss, norm)
        elif self._spikes.skips_update:
            skipped = broken
            step_unless(broken, self.optimizer)
        else:
            skipped = torch.zeros_like(broken)
            self.optimizer.step()
        if not (self._spikes.rolls_back and bool(broken)):
            self.watch.count_skipped(skipped)
            # A skipped step is a step of the schedule too: the learning rate is a function of the step alone.
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        figures = (loss, norm.to(loss.device), broken, skipped, self.watch.skipped_updates, *votes)
        return PendingStep(DeferredScalars(torch.stack([figure.double() for figure in figures])))

    def _gradients(self, vote: StopSaveVote) -> tuple[Tensor, Tensor, Tensor]:
        """Compute clipped gradients; return the loss of the global batch, the gradient norm and the summed votes."""
        self.model.train()
        device = self._components.device
        nats = torch.zeros((), dtype=torch.float64, device=device)
        tokens = torch.zeros((), dtype=torch.float64, device=device)
        for _ in range(self._components.batching.accumulation):
            batch = self._position.next_batch()
            context = document_context(self.model, batch, self._components)
            targets = self._objective.targets(batch, context)
            with self._accelerator.accumulate(self.model, count=batch.labels.ne(-100).sum()):
                sums = self.model(batch.inputs, targets=targets, **context)
                self._accelerator.backward(sums.total / sums.tokens)
            nats += sums.cross_entropy.double()
            tokens += sums.tokens.double()
        votes = [torch.full_like(nats, wanted) for wanted in vote]
        totals = self._accelerator.reduce(torch.stack([nats, tokens, *votes]), "sum")
        return totals[0] / totals[1], self._clip(), totals[2:]

    def _clip(self) -> Tensor:
        most = self._components.config.clip
        if self._zeros is not None:
            self._zeros.mask_gradients()
        if self._clips_in_step:
            # Gradients are scaled while the optimizer reads them, which saves a pass.
            return clip_in_step(self.optimizer.optimizer, self.model.parameters(), most)
        return cast(Tensor, self._accelerator.clip_grad_norm_(self.model.parameters(), most))

    def _update_by_verdict(self, step: int, broken: bool, loss: Tensor, norm: Tensor) -> Tensor:
        """Wait for the verdict, apply or skip the update, and return whether it was skipped."""
        if broken and self._spikes.stops:
            raise PiledriverError(
                f"the loss of step {step + 1} is {float(loss)} (gradient norm {float(norm)})",
                fix="lower optimizer.lr, or spikes.action=skip",
            )
        skipped = broken and self._spikes.skips_update
        if not skipped:
            self.optimizer.step()
            skipped = self._accelerator.scaler is not None and self._accelerator.optimizer_step_was_skipped
        return torch.full_like(loss, skipped, dtype=torch.bool)


def document_context(model: Transformer, batch: TokenBatch, components: RunComponents) -> dict[str, Any]:
    """Return the keyword arguments that keep the documents of a batch apart in attention."""
    if not components.stream.config.masks_documents:
        return {}
    if components.layout.pp > 1:
        # Each pipeline stage builds the masks of its micro-batches.
        return {"document_ids": batch.document_ids()}
    # A bound from the loader, so that the device need not be asked; powers of two limit recompilation.
    documents = 1 << max(batch.cu_seqlens.numel() - 2, 1).bit_length()
    masks = make_masks(
        components.shape,
        components.batching.seq_len,
        components.device,
        batch.document_ids(),
        kernel=model.attention_kernel,
        max_documents=documents,
    )
    return {"masks": masks}
