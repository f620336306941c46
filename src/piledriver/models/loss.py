"""Cross-entropy of a linear output layer in chunks of tokens: the logits of the whole batch never exist.

The gradients are computed in the forward pass, chunk by chunk, while the chunk's logits are there: three matrix
products in all, as in the plain path, with nothing recomputed; the backward pass only scales them. One custom operator,
so a compiled model calls it as it stands. It returns sums, not means: whoever knows the number of tokens of all
processes and micro-batches divides by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from piledriver.kernels import cross_entropy_triton as loss_kernel

IGNORE_INDEX = -100


class LossSums(NamedTuple):
    """Sums over the counted tokens. Divide `total` by a number of tokens and call backward on it."""

    total: Tensor
    """What to minimise: cross-entropy, z-loss and balance loss together. The only one that carries a gradient."""
    cross_entropy: Tensor
    """Negative log-likelihood in nats."""
    z_loss: Tensor
    """Sum of squared log-partition functions, before its coefficient."""
    balance: Tensor
    """Load-balance loss of the experts, times the number of tokens, before its coefficient; 0 without experts."""
    tokens: Tensor
    """How many targets were counted."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> LossSums:
    """Sum of cross-entropies of softmax(hidden @ weight.T) against targets, computed in the dtype of `hidden`.

    `z_loss` weighs log(Z)^2, which keeps logits from drifting (Chowdhery et al., PaLM, 2022). `chunk_tokens` trades
    memory for launches; the default keeps a chunk's logits near 512 MiB on a GPU and in the cache on a CPU.

    >>> hidden, weight, targets = torch.randn(6, 4), torch.randn(10, 4), torch.tensor([1, 2, 3, 4, 5, -100])
    >>> sums = linear_cross_entropy(hidden, weight, targets)
    >>> reference = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    >>> torch.allclose(sums.total, reference), int(sums.tokens)
    (True, 5)
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    grad = torch.is_grad_enabled()
    total, entropy, squares, _, _ = _chunked_loss(
        hidden,
        weight,
        targets,
        ignore_index,
        z_loss,
        softcap,
        chunk_tokens or default_chunk_tokens(weight.shape[0], hidden.device.type),
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
    )
    tokens = (targets != ignore_index).sum()
    return LossSums(total, entropy.detach(), squares.detach(), torch.zeros_like(total).detach(), tokens)


def plain_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> LossSums:
    """The same by the book, with all logits at once: the reference, and the faster way where logits are small."""
    targets = targets.flatten()
    logits = F.linear(hidden.flatten(0, -2), weight.to(hidden.dtype)).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    total = entropy = F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="sum")
    squares = torch.zeros_like(total)
    if z_loss:
        squares = torch.where(targets != ignore_index, logits.logsumexp(dim=-1).square(), 0.0).sum()
        total = total + z_loss * squares
    tokens = (targets != ignore_index).sum()
    return LossSums(total, entropy.detach(), squares.detach(), torch.zeros_like(total).detach(), tokens)


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> LossSums:
    """In chunks, or by the book where `chunk_tokens` is 0."""
    if chunk_tokens == 0:
        return plain_cross_entropy(hidden, weight, targets, z_loss=z_loss, softcap=softcap)
    return linear_cross_entropy(hidden, weight, targets, z_loss=z_loss, softcap=softcap, chunk_tokens=chunk_tokens)


def project(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits before their cap, in the dtype of `hidden`."""
    return F.linear(hidden, weight.to(hidden.dtype))


@torch.no_grad()
def token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Negative log-likelihood of every target in nats, fp32, shaped like `targets`; 0 where ignored. For evaluation."""
    rows, goals = hidden.flatten(0, -2), targets.flatten()
    weight = weight.to(rows.dtype)
    size = chunk_tokens or default_chunk_tokens(weight.shape[0], rows.device.type)
    losses = [
        F.cross_entropy(_capped(F.linear(x, weight), softcap), t, ignore_index=ignore_index, reduction="none")
        for x, t in zip(torch.split(rows, size), torch.split(goals, size), strict=True)
    ]
    return torch.cat(losses).view_as(targets)


def default_chunk_tokens(vocab_size: int, device_type: str) -> int:
    """A power of two of tokens whose logits fill 2^28 numbers on a GPU, 2^22 on a CPU.

    On a GPU not under 4,096: each chunk reads and writes the whole gradient of the weight.
    """
    budget, least = (1 << 22, 64) if device_type == "cpu" else (1 << 28, 4096)
    return 1 << max(budget // vocab_size, least).bit_length() - 1


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    logits = logits.float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    z_loss: float,
    softcap: float | None,
    chunk_tokens: int,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Total, cross-entropy, squares of log(Z); then the gradients of the total that were asked for (else empty)."""
    compute_weight = weight.to(hidden.dtype)
    sums = torch.zeros(3, dtype=torch.float32, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0)
    d_weight = torch.zeros_like(weight) if weight_grad else weight.new_empty(0)
    turn = _turn_of(hidden.device)
    for begin in range(0, hidden.shape[0], chunk_tokens):
        part = slice(begin, begin + chunk_tokens)
        logits = torch.mm(hidden[part], compute_weight.t())
        gradient, chunk_sums = turn(logits, targets[part], ignore_index, z_loss, softcap)
        sums += chunk_sums
        if hidden_grad:
            torch.mm(gradient, compute_weight, out=d_hidden[part])
        if weight_grad:
            _add_product(d_weight, gradient.t(), hidden[part])
    return sums[0].clone(), sums[1].clone(), sums[2].clone(), d_hidden, d_weight


_chunked_loss = torch.library.custom_op("piledriver::linear_cross_entropy", loss_and_gradients, mutates_args=())


@_chunked_loss.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    z_loss: float,
    softcap: float | None,
    chunk_tokens: int,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return empty_results(hidden, weight, hidden_grad, weight_grad)


def empty_results(
    hidden: Tensor, weight: Tensor, hidden_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Shapes of what a chunked loss returns: total, cross-entropy, log(Z)^2, and the gradients that are wanted."""
    d_hidden = torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0)
    d_weight = torch.empty_like(weight) if weight_grad else weight.new_empty(0)
    total, entropy, squares = (hidden.new_empty((), dtype=torch.float32) for _ in range(3))
    return total, entropy, squares, d_hidden, d_weight


@register_flop_formula(torch.ops.piledriver.linear_cross_entropy)
def _flops(hidden: Any, weight: Any, *settings: Any, out_shape: Any = None, **_: Any) -> int:
    products = 1 + sum(bool(wanted) for wanted in settings[-2:])
    return int(2 * products * hidden[0] * hidden[1] * weight[0])


def keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """A chunked loss made its gradients in the forward; its last two inputs say which."""
    ctx.settings = len(inputs) - 2
    ctx.hidden_grad, ctx.weight_grad = inputs[-2], inputs[-1]
    ctx.save_for_backward(output[3], output[4])


def scale_gradients(ctx: Any, total_grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """They only need the factor that the loss was multiplied by."""
    d_hidden, d_weight = ctx.saved_tensors
    # The factor is one over a number of tokens, which bf16 would round: multiply in fp32.
    scaled_hidden = (d_hidden.float() * total_grad).to(d_hidden.dtype) if ctx.hidden_grad else None
    scaled_weight = d_weight * total_grad.to(d_weight.dtype) if ctx.weight_grad else None
    return (scaled_hidden, scaled_weight, *(None,) * ctx.settings)


_chunked_loss.register_autograd(scale_gradients, setup_context=keep_gradients)


def _turn_into_gradient(
    logits: Tensor, targets: Tensor, ignore_index: int, z_loss: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """The gradient of the total by these logits, in their dtype, and the sums (total, cross-entropy, log(Z)^2)."""
    counted = targets != ignore_index
    goals = torch.where(counted, targets, 0).unsqueeze(1)
    capped = _capped(logits, softcap)
    log_p = capped.log_softmax(dim=-1)
    goal_log_p = log_p.gather(1, goals)
    log_z = capped.gather(1, goals) - goal_log_p
    loss = torch.where(counted, -goal_log_p.squeeze(1), 0.0).sum()
    squares = torch.where(counted, log_z.squeeze(1).square(), 0.0).sum()
    # One pass each on a CPU, in place; the compiler fuses the other form into a single kernel on a GPU.
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


@functools.cache
def _turn_of(device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """The fastest way on this device from logits to gradient: one kernel, a compiled one, or operator by operator."""
    if device.type == "cpu":
        return _turn_into_gradient
    return loss_kernel.turn_into_gradient if loss_kernel.available() else torch.compile(_turn_into_gradient)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in the dtype of `total` where the device can."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
