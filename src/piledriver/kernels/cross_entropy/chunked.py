"""Cross-entropy of a linear output layer in chunks of tokens: the logits of the whole batch are never stored.

The gradients are computed in the forward pass, chunk by chunk, while the chunk's logits exist: three matrix products in
all, as in the plain path, with nothing recomputed; the backward pass only scales them. It is one custom operator, so a
compiled model calls it as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from piledriver.kernels.registry import fastest_kernel
from piledriver.kernels.torch_private import graph_is_kept

IGNORE_INDEX = -100
_ROWS = 16
"""The output layer's rows are padded to a multiple of this on a GPU."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the total, the cross-entropy and the sum of log(Z)^2 of softmax(hidden @ weight.T) against targets.

    `hidden` is [tokens, dim], `weight` [vocab, dim]. Only the total, cross-entropy + z_loss * log(Z)^2, has a
    gradient. `chunk_tokens` trades memory for kernel launches.
    """
    grad = torch.is_grad_enabled()
    # A compiler reads the operator's own gradient and plans the memory itself.
    loss: Any = _chunked_loss if torch.compiler.is_compiling() else _ScaleInPlace.apply
    total, entropy, squares = loss(
        hidden,
        weight,
        targets,
        ignore_index,
        z_loss,
        softcap,
        chunk_tokens or default_chunk_tokens(weight.shape[0], hidden.device.type, weight.shape[1]),
        grad and hidden.requires_grad,
        grad and weight.requires_grad,
    )[:3]
    return total, entropy.detach(), squares.detach()


def default_chunk_tokens(vocab_size: int, device_type: str, dim: int = 0) -> int:
    """Return a power of two of tokens whose logits fill 2^28 numbers on a GPU, 2^22 on a CPU.

    Each chunk reads and writes the whole gradient of the weight. On a GPU it is therefore at least 1,024 tokens, and at
    least 7/4 of `dim` up to 2,048: the logits are then still smaller than the gradient in fp32 that exists beside them.
    """
    budget, least = (1 << 22, 64) if device_type == "cpu" else (1 << 28, 1024)
    tokens = 1 << max(budget // vocab_size, least).bit_length() - 1
    return tokens if device_type == "cpu" else max(tokens, min(2048, -(-7 * dim // 4 // _ROWS) * _ROWS))


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
    """Return the total, the cross-entropy, log(Z)^2, and the gradients of the total (empty where not asked for)."""
    vocab, tokens = weight.shape[0], hidden.shape[0]
    chunk_tokens = _even_chunks(tokens, chunk_tokens)
    compute_weight = _aligned_rows(weight, hidden.dtype)
    # One buffer for the logits of all chunks: a new one would exist beside the last.
    buffer = hidden.new_empty(min(chunk_tokens, tokens), compute_weight.shape[0])
    sums = torch.zeros(3, dtype=torch.float32, device=hidden.device)
    d_hidden = torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0)
    # With the padding's rows, which get zeros: a product of all rows is aligned, and the rest is a view without a gap.
    d_weight = weight.new_zeros(compute_weight.shape) if weight_grad else weight.new_empty(0)
    to_gradient = fastest_kernel("cross_entropy", hidden.device)
    for begin in range(0, tokens, chunk_tokens):
        part = slice(begin, begin + chunk_tokens)
        wide = buffer[: min(chunk_tokens, tokens - begin)]
        torch.mm(hidden[part], compute_weight.t(), out=wide)
        logits = wide[:, :vocab]
        gradient, chunk_sums = to_gradient(logits, targets[part], ignore_index, z_loss, softcap)
        sums += chunk_sums
        # A gradient written over the logits has zeros beyond the vocabulary, as the weight's rows are zero there.
        gradient = wide if gradient is logits else gradient
        if hidden_grad:
            torch.mm(gradient, compute_weight[: gradient.shape[1]], out=d_hidden[part])
        if weight_grad:
            add_product(d_weight[: gradient.shape[1]], gradient.t(), hidden[part])
    return sums[0].clone(), sums[1].clone(), sums[2].clone(), d_hidden, d_weight[:vocab] if weight_grad else d_weight


_chunked_loss = torch.library.custom_op("piledriver::linear_cross_entropy", loss_and_gradients, mutates_args=())


@_chunked_loss.register_fake
def _(hidden: Tensor, weight: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return empty_results(hidden, weight, *settings[-2:])


def empty_results(
    hidden: Tensor, weight: Tensor, hidden_grad: bool, weight_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return uninitialised tensors of the shapes that a chunked loss returns."""
    d_hidden = torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0)
    d_weight = torch.empty_like(weight) if weight_grad else weight.new_empty(0)
    total, entropy, squares = (hidden.new_empty((), dtype=torch.float32) for _ in range(3))
    return total, entropy, squares, d_hidden, d_weight


@register_flop_formula(torch.ops.piledriver.linear_cross_entropy)
def _flops(hidden: Any, weight: Any, *settings: Any, out_shape: Any = None, **_: Any) -> int:
    products = 1 + sum(bool(wanted) for wanted in settings[-2:])
    return int(2 * products * hidden[0] * hidden[1] * weight[0])


def save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the gradients that a chunked loss computed in its forward; its last two inputs say which."""
    ctx.settings = len(inputs) - 2
    ctx.hidden_grad, ctx.weight_grad = inputs[-2], inputs[-1]
    ctx.save_for_backward(output[3], output[4])


def scale_gradients(ctx: Any, total_grad: Tensor, *_: Tensor, in_place: bool = False) -> tuple[Tensor | None, ...]:
    """Return the saved gradients times the gradient of the total; `in_place`, the weight's is changed."""
    d_hidden, d_weight = ctx.saved_tensors
    # The factor is one over a number of tokens, which bf16 would round: multiply in fp32.
    scaled_hidden = (d_hidden.float() * total_grad).to(d_hidden.dtype) if ctx.hidden_grad else None
    scale = d_weight.mul_ if in_place else d_weight.mul
    scaled_weight = scale(total_grad.to(d_weight.dtype)) if ctx.weight_grad else None
    return (scaled_hidden, scaled_weight, *(None,) * ctx.settings)


_chunked_loss.register_autograd(scale_gradients, setup_context=save_gradients)


class _ScaleInPlace(torch.autograd.Function):
    """The operator, with gradients that belong to the graph alone.

    The weight's is scaled in place unless the graph is kept: a copy would exist beside it and all activations.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
        total, entropy, squares, *gradients = _chunked_loss(hidden, weight, *settings)
        save_gradients(ctx, (hidden, weight, *settings), (total, entropy, squares, *gradients))
        ctx.mark_non_differentiable(entropy, squares)
        return total, entropy, squares

    @staticmethod
    def backward(ctx: Any, total_grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return scale_gradients(ctx, total_grad, in_place=not graph_is_kept())


def needs_alignment(device: torch.device) -> bool:
    """Return whether products of rows that are not aligned are slow on a device."""
    return device.type == "cuda"


def _aligned_rows(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight in the compute dtype; on a GPU with rows of zeros up to a number that its kernels are fast for.

    Logits in rows that do not begin at multiples of 16 bytes take a slow path in every product.
    """
    vocab, dim = weight.shape
    if not needs_alignment(weight.device) or vocab % _ROWS == 0:
        return weight.to(dtype)
    aligned = weight.new_zeros((vocab + _ROWS - 1) // _ROWS * _ROWS, dim, dtype=dtype)
    aligned[:vocab] = weight
    return aligned


def _even_chunks(tokens: int, chunk_tokens: int) -> int:
    """Return the size of chunks that are as few as with `chunk_tokens`, and of nearly equal size, aligned."""
    chunks = max(-(-tokens // chunk_tokens), 1)
    return max(min(-(-tokens // chunks // _ROWS) * _ROWS, chunk_tokens), 1)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, summed in the dtype of `total` where the device supports it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
