"""Cross-entropy in plain torch: with all logits at once, and the step from logits to their gradient that chunks use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.registry import Kernel


class ReferenceCrossEntropy(Kernel):
    """The formula, operator by operator."""

    def __call__(
        self, logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of the total with respect to the logits, in their dtype, and three sums.

        The sums are the total, the cross-entropy and log(Z)^2 over the targets that are not `ignore_index`. The
        gradient may be written over the logits.
        """
        return logits_to_gradient(logits, targets, ignore_index, z_loss, softcap)


class CompiledCrossEntropy(Kernel):
    """The formula, compiled: for accelerators without Triton."""

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        return device.type != "cpu"

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor]:
        return _compiled()(*args)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(logits_to_gradient)


def logits_to_gradient(
    logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the gradient and the sums as `ReferenceCrossEntropy` describes them."""
    counted = targets != ignore_index
    goals = torch.where(counted, targets, 0).unsqueeze(1)
    capped = cap_logits(logits, softcap)
    log_p = capped.log_softmax(dim=-1)
    goal_log_p = log_p.gather(1, goals)
    log_z = capped.gather(1, goals) - goal_log_p
    loss = torch.where(counted, -goal_log_p.squeeze(1), 0.0).sum()
    squares = torch.where(counted, log_z.squeeze(1).square(), 0.0).sum()
    # In place and one pass each on a CPU; the other form is what the compiler fuses into a single kernel on a GPU.
    gradient = log_p.exp() if logits.is_cuda else log_p.exp_()
    if z_loss:
        gradient = gradient * (1.0 + 2.0 * z_loss * log_z)
    if logits.is_cuda:
        gradient = gradient - (torch.arange(logits.shape[1], device=logits.device) == goals).to(gradient.dtype)
    else:
        gradient.scatter_add_(1, goals, torch.full_like(goal_log_p, -1.0))
    if softcap is not None:
        gradient = gradient * (1.0 - (capped / softcap).square())
    if logits.is_cuda:
        gradient = torch.where(counted.unsqueeze(1), gradient, 0.0)
    elif not bool(counted.all()):
        gradient[~counted] = 0.0
    return gradient.to(logits.dtype), torch.stack((loss + z_loss * squares, loss, squares))


def full_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int, z_loss: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the total, the cross-entropy and the sum of log(Z)^2, with all logits at once."""
    logits = cap_logits(F.linear(hidden, weight.to(hidden.dtype)), softcap)
    total = entropy = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    squares = torch.zeros_like(total)
    if z_loss:
        squares = torch.where(targets != ignore_index, logits.logsumexp(dim=-1).square(), 0.0).sum()
        total = total + z_loss * squares
    return total, entropy.detach(), squares.detach()


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Return fp32 logits, as cap * tanh(logit / cap) if there is a cap."""
    logits = logits.float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)
