"""Blockwise attention: queries over one block of the keys, with the log-sum-exp that merges blocks, and its gradient.

Ring attention is made of these. The gradient of a block needs only the output and the log-sum-exp over all keys:
exp(score - lse) is then the probability under the softmax over all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.attention.flash import FlashAttention
from piledriver.kernels.attention.kernel import AttentionKernel
from piledriver.kernels.attention.reference import ReferenceAttention, repeat_heads

_FLASH, _REFERENCE = FlashAttention(), ReferenceAttention()


def attend_block(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention over these keys, and the log-sum-exp of each query's scores ([batch, heads, queries], fp32)."""
    k, v = (repeat_heads(x, q.shape[1]).contiguous() for x in (k, v))
    return _kernel_for(q).with_log_sum_exp(q, k, v, causal, scale)


def attend_block_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v over this block, given the output and the log-sum-exp over all keys."""
    kv_heads = k.shape[1]
    k, v = (repeat_heads(x, q.shape[1]).contiguous() for x in (k, v))
    d_q, d_k, d_v = _kernel_for(q).backward(gradient, q, k, v, out, lse, causal, scale)
    return d_q, _sum_heads(d_k, kv_heads), _sum_heads(d_v, kv_heads)


def merge_blocks(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention over two blocks of keys from that over each, in fp32, and its log-sum-exp."""
    both = torch.logaddexp(lse, more_lse)
    old, new = (lse - both).exp().unsqueeze(-1), (more_lse - both).exp().unsqueeze(-1)
    return out * old + more.float() * new, both


def _kernel_for(q: Tensor) -> AttentionKernel:
    return _FLASH if FlashAttention.takes(q) else _REFERENCE


def _sum_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(dim=2)  # type: ignore[no-untyped-call]
