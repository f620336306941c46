"""Attention as its formula, softmax(q k^T * scale) v, in plain torch: what every other kernel is compared with.

It runs on every device and under every transform, supports every mask and score, and stores all scores.
Shapes are [batch, heads, time, head_dim].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piledriver.kernels.attention.kernel import AttentionKernel, Mask


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return attention under a boolean `mask` (True where a query may attend), with `bias` added to the scores.

    A query that may attend to nothing gets zeros, as with torch's fused kernels. `sinks` ([heads]) are scores that take
    part in the softmax and attend to nothing. `drop` is applied to the probabilities.

    >>> q, k, v = torch.randn(3, 1, 2, 5, 4)
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(reference_attention(q, k, v, causal=True), expected, atol=1e-6)
    True
    """
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = _scores(q, k, q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(~_causal(scores), -torch.inf)
    if mask is not None:
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1) if sinks is None else _softmax_with(sinks, scores)
    if mask is not None:
        # A row without any True is uniform over forbidden keys here.
        weights = torch.where(mask, weights, 0.0)
    if drop is not None:
        weights = drop(weights)
    return weights.to(v.dtype) @ v


class ReferenceAttention(AttentionKernel):
    """The formula; it also returns the log-sum-exp, and computes the gradient from it."""

    log_sum_exp = sinks = True

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        dense = mask.dense
        additive = dense is not None and dense.dtype != torch.bool
        return reference_attention(
            q,
            k,
            v,
            mask=None if additive else dense,
            bias=dense if additive else None,
            causal=dense is None,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )

    def with_log_sum_exp(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        scores = _causal_scores(q, k, causal, scale)
        return scores.softmax(dim=-1).to(v.dtype) @ v, scores.logsumexp(dim=-1)

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        p = (_causal_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
        wide = gradient.float()
        d_p = wide @ v.float().transpose(-2, -1)
        d_scores = p * (d_p - (wide * out.float()).sum(dim=-1, keepdim=True)) * scale
        d_q, d_k = d_scores @ k.float(), d_scores.transpose(-2, -1) @ q.float()
        return d_q.to(q.dtype), d_k.to(k.dtype), (p.transpose(-2, -1) @ wide).to(v.dtype)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Return keys or values with `heads` heads, each repeated for the queries that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _softmax_with(sinks: Tensor, scores: Tensor) -> Tensor:
    column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    raw = q @ k.transpose(-2, -1)
    raw = raw if raw.dtype == torch.float64 else raw.float()
    return raw * scale if softcap is None else softcap * torch.tanh(raw * (scale / softcap))


def _causal(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()


def _causal_scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = _scores(q, k, scale)
    return scores.masked_fill(~_causal(scores), -torch.inf) if causal else scores
