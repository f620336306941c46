"""Distillation loss of a linear output layer in chunks of tokens: neither model's logits of a batch are ever stored.

As in `kernels.cross_entropy`, gradients are computed in the forward pass while a chunk's logits exist, and the backward
pass only scales them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from piledriver.kernels.cross_entropy import IGNORE_INDEX, add_product, cap_logits, default_chunk_tokens
from piledriver.models.loss import LossSums

Divergence = Literal["forward", "reverse"]
_TINY = 1e-9


class Distribution(NamedTuple):
    """A teacher's distribution of the next token, of some tokens."""

    log_q: Tensor
    """[tokens, vocab] logits in any dtype, which the loss normalises; or [tokens, k] log-probabilities of the ids."""
    ids: Tensor | None = None
    """[tokens, k]: what `log_q` belongs to; the rest of the probability is spread over one further outcome."""


class TeacherOutputs(Protocol):
    """What the teacher says about a batch. Not a tuple of tensors: wrappers of the model must leave it alone."""

    def chunk(self, begin: int, end: int, temperature: float) -> Distribution:
        """Return the distribution of the tokens from `begin` to `end` of the flattened batch."""


class DivergenceSettings(NamedTuple):
    """How the losses are mixed."""

    kind: Divergence = "forward"
    """forward: KL(teacher || student); reverse: KL(student || teacher)."""
    temperature: float = 1.0
    """Both models' logits are divided by it; the divergence is multiplied by its square (Hinton et al., 2015)."""
    cross_entropy: float = 0.0
    """Share of the cross-entropy against the data; the divergence has the rest."""


def linear_distillation(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: TeacherOutputs,
    settings: DivergenceSettings,
    *,
    softcap: float | None = None,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
) -> LossSums:
    """Return the loss sums of softmax(hidden @ weight.T) against a teacher and targets (-100 is ignored)."""
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    size = chunk_tokens or _chunk_tokens(weight.shape[0], hidden.device.type)
    found: tuple[Tensor, Tensor, Tensor] = _ChunkedDistillation.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, teacher, settings, softcap, z_loss, size
    )
    total, entropy, squares = found
    zero = torch.zeros_like(total).detach()
    return LossSums(total, entropy.detach(), squares.detach(), zero, (targets != IGNORE_INDEX).sum())


def _chunk_tokens(vocab_size: int, device_type: str) -> int:
    """Return the tokens of a chunk: fewer than for a loss without a teacher, as several tensors of logits exist."""
    share, least = (2, 64) if device_type == "cpu" else (4, 512)
    return max(least, default_chunk_tokens(vocab_size, device_type) // share)


class _ChunkedDistillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        teacher: TeacherOutputs,
        settings: DivergenceSettings,
        softcap: float | None,
        z_loss: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden_grad, weight_grad = ctx.needs_input_grad[:2]
        small = weight.to(hidden.dtype)
        sums = torch.zeros(3, dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if hidden_grad else None
        d_weight = torch.zeros_like(weight) if weight_grad else None
        gradient_of = _gradient_function(hidden.device.type)
        for begin in range(0, hidden.shape[0], chunk_tokens):
            part = slice(begin, min(begin + chunk_tokens, hidden.shape[0]))
            logits = torch.mm(hidden[part], small.t())
            known = teacher.chunk(part.start, part.stop, settings.temperature)
            gradient, chunk_sums = gradient_of(logits, targets[part], known, settings, softcap, z_loss)
            sums += chunk_sums
            if d_hidden is not None:
                torch.mm(gradient, small, out=d_hidden[part])
            if d_weight is not None:
                add_product(d_weight, gradient.t(), hidden[part])
        ctx.save_for_backward(d_hidden, d_weight)
        return sums[0].clone(), sums[1].clone(), sums[2].clone()

    @staticmethod
    def backward(ctx: Any, total_grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        scaled_hidden = None if d_hidden is None else (d_hidden.float() * total_grad).to(d_hidden.dtype)
        scaled_weight = None if d_weight is None else d_weight * total_grad.to(d_weight.dtype)
        return (scaled_hidden, scaled_weight, *(None,) * 6)


def distillation_gradient(
    logits: Tensor,
    targets: Tensor,
    teacher: Distribution,
    settings: DivergenceSettings,
    softcap: float | None,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the total by the student's logits, and the total, cross-entropy and log(Z)^2."""
    counted = targets != IGNORE_INDEX
    goals = torch.where(counted, targets, 0).unsqueeze(1)
    capped = cap_logits(logits, softcap)
    log_z = capped.logsumexp(dim=-1, keepdim=True)
    log_p = capped - log_z
    losses = -log_p.gather(1, goals)
    p, temperature, share = log_p.exp(), settings.temperature, settings.cross_entropy
    log_pt = log_p if temperature == 1.0 else (capped / temperature).log_softmax(dim=-1)
    pt = p if temperature == 1.0 else log_pt.exp()
    divergence, gradient = _divergence(log_pt, pt, teacher, settings.kind)
    # In place: on a CPU a new tensor of this size costs more than the arithmetic.
    gradient = gradient.mul_((1.0 - share) * temperature)
    if share:
        here = torch.arange(logits.shape[1], device=logits.device) == goals
        gradient = gradient.add_(p, alpha=share).add_(here, alpha=-share)
    if z_loss:
        gradient = gradient.add_(p * (2.0 * z_loss * log_z))
    if softcap is not None:
        gradient = gradient.mul_(1.0 - (capped / softcap).square())
    gradient = gradient.masked_fill_(~counted.unsqueeze(1), 0.0)
    total = (1.0 - share) * temperature**2 * divergence + share * losses + z_loss * log_z.square()
    rows = torch.cat((total, losses, log_z.square()), dim=1)
    return gradient.to(logits.dtype), torch.where(counted.unsqueeze(1), rows, 0.0).sum(dim=0)


def _divergence(log_p: Tensor, p: Tensor, teacher: Distribution, kind: Divergence) -> tuple[Tensor, Tensor]:
    """Return the divergence of each token, [tokens, 1], and its gradient by what log_p is the log-softmax of."""
    if teacher.ids is None:
        # Here and not at the teacher: compiled, no tensor of its log-probabilities is stored.
        log_q = teacher.log_q.to(log_p.dtype).log_softmax(dim=-1)
        if kind == "forward":
            q = log_q.exp()
            return (log_q - log_p).mul_(q).sum(dim=-1, keepdim=True), q.neg_().add_(p)
        ratio = log_p - log_q
        value = (p * ratio).sum(dim=-1, keepdim=True)
        return value, ratio.sub_(value).mul_(p)
    log_q, ids = teacher.log_q, teacher.ids
    q, log_pk = log_q.exp(), log_p.gather(1, ids)
    pk = log_pk.exp()
    rest_q = (1.0 - q.sum(dim=-1, keepdim=True)).clamp(min=_TINY)
    rest_p = (1.0 - pk.sum(dim=-1, keepdim=True)).clamp(min=_TINY)
    if kind == "forward":
        value = (q * (log_q - log_pk)).sum(dim=-1, keepdim=True) + rest_q * (rest_q.log() - rest_p.log())
        return value, (p * (1.0 - rest_q / rest_p)).scatter(1, ids, pk - q)
    rest = rest_p.log() - rest_q.log()
    value = (pk * (log_pk - log_q)).sum(dim=-1, keepdim=True) + rest_p * rest
    return value, (p * (rest - value)).scatter(1, ids, pk * (log_pk - log_q - value))


@functools.cache
def _gradient_function(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return `distillation_gradient`, compiled into few kernels on a GPU."""
    return distillation_gradient if device_type == "cpu" else torch.compile(distillation_gradient)
