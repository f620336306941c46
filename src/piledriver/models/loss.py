"""The loss of a language model as sums over tokens, from hidden states and the output weight.

Sums, not means: the training loop divides by the number of tokens of all ranks and micro-batches. The logits of a whole
batch are not stored (`kernels.cross_entropy`) unless `chunk_tokens` is 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.cross_entropy import (
    IGNORE_INDEX,
    cap_logits,
    chunked_cross_entropy,
    default_chunk_tokens,
    full_cross_entropy,
)


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

    @property
    def loss(self) -> Tensor:
        """The mean over the counted tokens, as Hugging Face models name it."""
        return (self.total / self.tokens).to(self.total.dtype)


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
    """Return the summed cross-entropy of softmax(hidden @ weight.T) against targets, in the dtype of `hidden`.

    `z_loss` is the weight of log(Z)^2, which keeps logits from drifting (Chowdhery et al., PaLM, 2022). `chunk_tokens`
    trades memory for kernel launches; the default keeps a chunk's logits near 512 MiB on a GPU, in the cache on a CPU.
    With 0 all logits are computed at once: the reference, and faster if they are small.

    >>> hidden, weight, targets = torch.randn(6, 4), torch.randn(10, 4), torch.tensor([1, 2, 3, 4, 5, -100])
    >>> sums = linear_cross_entropy(hidden, weight, targets)
    >>> reference = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    >>> torch.allclose(sums.total, reference), int(sums.tokens)
    (True, 5)
    """
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    options: dict[str, Any] = {"ignore_index": ignore_index, "z_loss": z_loss, "softcap": softcap}
    if chunk_tokens == 0:
        sums = full_cross_entropy(hidden, weight, targets, **options)
    else:
        sums = chunked_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens, **options)
    total, entropy, squares = sums
    return LossSums(total, entropy, squares, torch.zeros_like(total).detach(), (targets != ignore_index).sum())


def project(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return logits before soft-capping, in the dtype of `hidden`."""
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
    """Return the negative log-likelihood of every target in nats, fp32, shaped like `targets`; 0 where ignored."""
    rows, goals = hidden.flatten(0, -2), targets.flatten()
    weight = weight.to(rows.dtype)
    size = chunk_tokens or default_chunk_tokens(weight.shape[0], rows.device.type)
    losses = [
        F.cross_entropy(cap_logits(F.linear(x, weight), softcap), t, ignore_index=ignore_index, reduction="none")
        for x, t in zip(torch.split(rows, size), torch.split(goals, size), strict=True)
    ]
    return torch.cat(losses).view_as(targets)
