"""Cross-entropy with the output rows sharded over the vocabulary, in chunks of tokens, without full logits.

Per chunk the maximum logit is all-reduced, then the sum of exponentials and the target's logit: three numbers per token
are sent. z-loss and soft-capping are exact, since all ranks know log(Z). Gradients are computed in the forward, chunk
by chunk, as in `kernels.cross_entropy`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from piledriver.engine.shards.collectives import Group, all_reduce_without_grad
from piledriver.kernels.cross_entropy.chunked import (
    IGNORE_INDEX,
    default_chunk_tokens,
    empty_results,
    save_gradients,
    scale_gradients,
)
from piledriver.models.loss import LossSums


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    first: int,
    group: Group,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> LossSums:
    """Return the sums of `linear_cross_entropy`, where `weight` holds the vocabulary's rows from `first` on.

    All ranks pass the same `hidden` and `targets` and get the same sums. The gradient of `hidden` is partial: reduce it
    (`copy_to_region`, `gather_from_sequence_region`).
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    grad = torch.is_grad_enabled()
    total, entropy, squares, _, _ = _split_loss(
        hidden,
        weight,
        targets,
        first,
        ignore_index,
        z_loss,
        0.0 if softcap is None else softcap,
        chunk_tokens or default_chunk_tokens(weight.shape[0], hidden.device.type),
        group.name,
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
    )
    tokens = (targets != ignore_index).sum()
    return LossSums(total, entropy.detach(), squares.detach(), torch.zeros_like(total).detach(), tokens)


@torch.no_grad()
def vocab_parallel_token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    first: int,
    group: Group,
    softcap: float | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """Return what `models.loss.token_losses` would, on every rank; `weight` holds the rows from `first` on."""
    rows, goals = hidden.flatten(0, -2), targets.flatten()
    weight, cap = weight.to(rows.dtype), 0.0 if softcap is None else softcap
    size = default_chunk_tokens(weight.shape[0], rows.device.type)
    losses = []
    for chunk, goal_ids in zip(torch.split(rows, size), torch.split(goals, size), strict=True):
        log_z, goal = _log_z_and_goal(chunk @ weight.t(), goal_ids, first, cap, group.name)
        losses.append(torch.where(goal_ids != ignore_index, log_z - goal, 0.0))
    return torch.cat(losses).view_as(targets)


def _log_z_and_goal(logits: Tensor, targets: Tensor, first: int, softcap: float, group: str) -> tuple[Tensor, Tensor]:
    """Return log(Z) and the target's logit over the full vocabulary, [tokens] each."""
    largest_of, parts_of, _ = _phases(logits.device.type)
    largest = all_reduce_without_grad(largest_of(logits, softcap), "max", group)
    exponentials, goal = all_reduce_without_grad(parts_of(logits, targets, largest, first, softcap), "sum", group)
    return largest + exponentials.log(), goal


@torch.library.custom_op("piledriver::split_cross_entropy", mutates_args=())
def _split_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    first: int,
    ignore_index: int,
    z_loss: float,
    softcap: float,
    chunk_tokens: int,
    group: str,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    compute_weight = weight.to(hidden.dtype)
    sums = torch.zeros(2, dtype=torch.float32, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0)
    d_weight = torch.zeros_like(weight) if weight_grad else weight.new_empty(0)
    gradient_of = _phases(hidden.device.type)[2]
    for begin in range(0, hidden.shape[0], chunk_tokens):
        chunk, goals = hidden[begin : begin + chunk_tokens], targets[begin : begin + chunk_tokens]
        logits = chunk @ compute_weight.t()
        log_z, goal = _log_z_and_goal(logits, goals, first, softcap, group)
        counted = goals != ignore_index
        sums += torch.stack(
            (torch.where(counted, log_z - goal, 0.0).sum(), torch.where(counted, log_z.square(), 0.0).sum())
        )
        gradient = gradient_of(logits, goals, log_z, counted, first, z_loss, softcap)
        if hidden_grad:
            d_hidden[begin : begin + chunk_tokens] = gradient @ compute_weight
        if weight_grad:
            d_weight += (gradient.t() @ chunk).to(d_weight.dtype)
    return sums[0] + z_loss * sums[1], sums[0].clone(), sums[1].clone(), d_hidden, d_weight


@_split_loss.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    first: int,
    ignore_index: int,
    z_loss: float,
    softcap: float,
    chunk_tokens: int,
    group: str,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return empty_results(hidden, weight, hidden_grad, weight_grad)


_split_loss.register_autograd(scale_gradients, setup_context=save_gradients)


def _largest(logits: Tensor, softcap: float) -> Tensor:
    """Return the largest local logit, [tokens]; -inf for an empty shard."""
    if logits.shape[1] == 0:
        return logits.new_full((logits.shape[0],), -torch.inf, dtype=torch.float32)
    return _capped(logits, softcap).max(dim=-1).values


def _parts(logits: Tensor, targets: Tensor, largest: Tensor, first: int, softcap: float) -> Tensor:
    """Return the local sum of exponentials and the target's logit if its row is here, [2, tokens]."""
    capped = _capped(logits, softcap)
    mine, place = _place(targets, first, logits.shape[1])
    goal = capped.gather(1, place) if logits.shape[1] else capped.new_zeros(capped.shape[0], 1)
    goal = torch.where(mine, goal.squeeze(1), 0.0)
    return torch.stack(((capped - largest.unsqueeze(1)).exp().sum(dim=-1), goal))


def _gradient(
    logits: Tensor, targets: Tensor, log_z: Tensor, counted: Tensor, first: int, z_loss: float, softcap: float
) -> Tensor:
    """Return the gradient of the total by the local logits, in their dtype."""
    capped = _capped(logits, softcap)
    probabilities = (capped - log_z.unsqueeze(1)).exp()
    if z_loss:
        probabilities = probabilities * (1.0 + 2.0 * z_loss * log_z.unsqueeze(1))
    places = torch.arange(logits.shape[1], device=logits.device) + first
    gradient = probabilities - (places == targets.unsqueeze(1)).to(probabilities.dtype)
    if softcap:
        gradient = gradient * (1.0 - (capped / softcap).square())
    return torch.where(counted.unsqueeze(1), gradient, 0.0).to(logits.dtype)


def _capped(logits: Tensor, softcap: float) -> Tensor:
    logits = logits.float()
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def _place(targets: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    mine = (targets >= first) & (targets < first + size)
    return mine, torch.where(mine, targets - first, 0).unsqueeze(1)


@functools.cache
def _phases(device_type: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the three phases: compiled kernels on a GPU, eager on a CPU."""
    if device_type == "cpu":
        return _largest, _parts, _gradient
    return torch.compile(_largest), torch.compile(_parts), torch.compile(_gradient)
