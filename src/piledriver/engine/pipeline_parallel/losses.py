"""The loss of a batch from its micro-batches: sums, divided once by the number of targets of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from piledriver.engine.mesh import Mesh
from piledriver.engine.pipeline_parallel.microbatches import MicroBatch, count_targets
from piledriver.engine.pipeline_parallel.stages.transformer import pack, unpack
from piledriver.models.loss import LossSums

LossFunction = Callable[[Any, Any], Any]


class Losses:
    """The loss sums of one batch, accumulated on the last stage."""

    def __init__(
        self,
        microbatches: list[MicroBatch],
        loss_fn: LossFunction | None,
        *,
        own: bool,
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self.microbatches, self.own = microbatches, own
        self._loss_fn = loss_fn or shifted_cross_entropy
        # Hugging Face's loss does not count the first label.
        first = 1 if loss_fn is None and not own else 0
        weights = torch.stack(
            [torch.as_tensor(count_targets(_from_label(part.targets, first)), device=device) for part in microbatches]
        ).double()
        # Our own loss counts its targets; for others the host reads the counts once per batch.
        self._weights = [] if own else weights.tolist()
        total = weights.sum()
        for axis in mesh.dp_groups:
            dist.all_reduce(total, group=axis.get_group())
        self.weight = total
        """Number of targets of all ranks."""
        self._processes = mesh.reduce_size
        self._factor: Tensor | float = 1.0
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)

    def divide_by(self, divisor: Tensor | float, scale: Tensor | float) -> None:
        """Set the factor of the gradients. Ranks are averaged afterwards, so it includes their number."""
        self._factor = scale * self._processes / divisor

    def of(self, output: Any, number: int) -> Tensor:
        """Return the loss of one micro-batch to call backward on, and add its sums."""
        if not self.own:
            output = self._sums_of(output, self.microbatches[number], self._weights[number])
        self._sums = self._sums + output.detach()
        total: Tensor = output[0]
        return total * self._factor

    def all_reduce(self, mesh: Mesh) -> LossSums:
        """Return the sums over all micro-batches and ranks, on every rank."""
        for axis in [mesh.pp, *mesh.dp_groups]:
            dist.all_reduce(self._sums, group=axis.get_group())
        return unpack(self._sums)

    def _sums_of(self, output: Any, micro: MicroBatch, weight: float) -> Tensor:
        if micro.rows < micro.filled:
            output = _first_rows(output, micro.rows)
        if weight == 0:
            # A mean over no targets, and its gradient, would be NaN.
            return torch.stack([_touch(output).double() * 0.0, *self._sums.new_zeros(4)])
        value = self._loss_fn(output, micro.targets)
        if isinstance(value, LossSums):
            return pack(value)
        total = value.double() * weight
        nothing = torch.zeros_like(total).detach()
        return torch.stack([total, total.detach(), nothing, nothing, nothing + weight])


class TokenLosses:
    """The loss of every target of one batch, collected on the last stage."""

    own = True

    def __init__(self, microbatches: list[MicroBatch], targets: Tensor, device: torch.device) -> None:
        self.microbatches = microbatches
        self._losses = torch.zeros(targets.shape, device=device)

    def of(self, output: Tensor, number: int) -> None:
        """Store the losses of one micro-batch."""
        begin, rows = sum(micro.rows for micro in self.microbatches[:number]), self.microbatches[number].rows
        self._losses[begin : begin + rows] = output[:rows]

    def all_reduce(self, group: Any) -> Tensor:
        """Return all losses, on every rank of the pipeline."""
        dist.all_reduce(self._losses, group=group)
        return self._losses


def shifted_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of Hugging Face's causal models: each token predicts the next, -100 is ignored."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def _from_label(targets: Any, first: int) -> Any:
    return targets[:, first:] if first else targets


def _touch(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.sum()
    members = output.values() if isinstance(output, dict) else output
    return torch.stack([_touch(member) for member in members if isinstance(member, Tensor)]).sum()


def _first_rows(output: Any, rows: int) -> Any:
    if isinstance(output, Tensor):
        return output[:rows]
    return type(output)(_first_rows(member, rows) for member in output)
