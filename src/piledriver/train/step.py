"""One optimizer step on the mean loss over every token of the global batch, left out if it went wrong.

The device is given the whole step before anybody asks how it went: loss, norm, verdict and update follow each other
there, and the host reads the figures when the next step is under way. What acts on a verdict at once (`stop`,
`rollback`, the scaler of fp16, an optimizer that cannot be told on the device) waits for it.
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
from piledriver.train.position import Position
from piledriver.train.setup import RunComponents
from piledriver.train.spikes.detect import SpikeWatch


class StopSaveVote(NamedTuple):
    """What a process would like to do after a step, and all of them then do if one does."""

    stop: bool = False
    save: bool = False


class Result(NamedTuple):
    """What came of one step."""

    loss: float
    norm: float
    broken: bool
    """The loss, or the gradient, went wrong."""
    skipped: bool
    """Its update was left out."""
    left_out: int
    """Updates that were left out until here, this one included."""
    vote: StopSaveVote
    """Of all processes, when they were given the step."""


class PendingStep:
    """A step that was handed to the device."""

    def __init__(self, reading: DeferredScalars) -> None:
        self.reading = reading

    def result(self) -> Result:
        """Waits for the device."""
        loss, norm, broken, skipped, left_out, stop, save = self.reading.read()
        return Result(loss, norm, bool(broken), bool(skipped), int(left_out), StopSaveVote(stop > 0, save > 0))


class TrainStep:
    """Takes steps of a prepared model."""

    def __init__(
        self, components: RunComponents, model: Transformer, optimizer: Any, scheduler: Any, position: Position
    ) -> None:
        self._components, self._position = components, position
        self._accelerator, self._action = components.accelerator, components.config.spikes.action
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.watch = SpikeWatch(components.config.spikes, components.device)
        self.waits = self._has_to_wait()
        alone = not components.world.is_distributed and not components.layout.offloads
        self._clips_in_step = capabilities(optimizer).clips_in_step and alone

    def _has_to_wait(self) -> bool:
        """Whether the host has to know how a step went before it goes on."""
        if self._accelerator.scaler is not None or self._action in ("stop", "rollback"):
            return True
        return self._action == "skip" and not can_skip_on_device(self.optimizer, self._components.device)

    def run(self, step: int, vote: StopSaveVote) -> PendingStep:
        """Run one step; a broken one is handled as `spikes.action` says. The vote is reduced with its loss."""
        loss, norm, votes = self._gradients(vote)
        # Scaled gradients overflow now and then, which the scaler sees to; any others that do are broken.
        broken = self.watch.judge(step, loss, norm if self._accelerator.scaler is None else None)
        if self.waits:
            skipped = self._update_by_verdict(step, bool(broken), loss, norm)
        elif self._action == "skip":
            skipped = broken
            step_unless(broken, self.optimizer)
        else:
            skipped = torch.zeros_like(broken)
            self.optimizer.step()
        if not (self.waits and self._action == "rollback" and bool(broken)):
            self.watch.leave_out(skipped)
            # A skipped step is a step of the schedule too: the learning rate is a function of the step alone.
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        figures = (loss, norm.to(loss.device), broken, skipped, self.watch.left_out, *votes)
        return PendingStep(DeferredScalars(torch.stack([figure.double() for figure in figures])))

    def _gradients(self, vote: StopSaveVote) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of the whole batch, the norm of its gradient, which is clipped, and how many wish what."""
        self.model.train()
        device = self._components.device
        nats = torch.zeros((), dtype=torch.float64, device=device)
        tokens = torch.zeros((), dtype=torch.float64, device=device)
        for _ in range(self._components.batching.accumulation):
            batch = self._position.next_batch()
            with self._accelerator.accumulate(self.model, count=batch.labels.ne(-100).sum()):
                sums = self.model(batch.inputs, targets=batch.labels, **document_context(batch, self._components))
                self._accelerator.backward(sums.total / sums.tokens)
            nats += sums.cross_entropy.double()
            tokens += sums.tokens.double()
        votes = [torch.full_like(nats, wish) for wish in vote]
        totals = self._accelerator.reduce(torch.stack([nats, tokens, *votes]), "sum")
        return totals[0] / totals[1], self._clip(), totals[2:]

    def _clip(self) -> Tensor:
        most = self._components.config.clip
        if self._clips_in_step:
            # The gradients are scaled while they are read, which saves a pass over all of them.
            return clip_in_step(self.optimizer.optimizer, self.model.parameters(), most)
        return cast(Tensor, self._accelerator.clip_grad_norm_(self.model.parameters(), most))

    def _update_by_verdict(self, step: int, broken: bool, loss: Tensor, norm: Tensor) -> Tensor:
        """Update, or not, now that it is known; whether it was left out."""
        if broken and self._action == "stop":
            raise PiledriverError(
                f"the loss of step {step + 1} is {float(loss)} (gradient norm {float(norm)})",
                fix="lower optimizer.lr, or spikes.action=skip",
            )
        skipped = broken and self._action in ("skip", "rollback")
        if not skipped:
            self.optimizer.step()
            skipped = self._accelerator.scaler is not None and self._accelerator.optimizer_step_was_skipped
        return torch.full_like(loss, skipped, dtype=torch.bool)


def document_context(batch: TokenBatch, components: RunComponents) -> dict[str, Any]:
    """Return the keyword arguments that keep the documents of a batch apart in attention."""
    if components.config.data.packing == "joined":
        return {}
    if components.layout.pp > 1:
        # A pipeline cuts the batch, and each stage makes the masks of its micro-batches.
        return {"document_ids": batch.document_ids()}
    # The loader knows the number of documents, so the device need not be asked. Powers of two limit recompilation.
    documents = 1 << max(batch.cu_seqlens.numel() - 2, 1).bit_length()
    ids = batch.document_ids()
    return {
        "masks": make_masks(
            components.shape, components.batching.seq_len, components.device, ids, max_documents=documents
        )
    }
