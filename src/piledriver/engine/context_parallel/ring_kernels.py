"""Attention of some queries over some keys with its log-sum-exp, and its gradient from the log-sum-exp over all keys.

Ring attention is made of these. Where the parts of the keys are merged, the gradient of a part needs only the output
and the log-sum-exp of the whole: p = exp(score - lse) is then the right probability.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_flash_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward


def attend_part(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of each query's scores ([batch, heads, queries], fp32)."""
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    if q.device.type == "cpu":
        out, lse = _flash_cpu(q, k, v, 0.0, causal, scale=scale)
    elif _has_flash(q):
        out, lse = _flash(q, k, v, 0.0, causal, False, scale=scale)[:2]
    else:
        return _formula(q, k, v, causal, scale)
    return out, lse.float()


def attend_part_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by q, k and v of this part, given the output and log-sum-exp over all keys."""
    kv_heads = k.shape[1]
    k, v = _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
    if q.device.type == "cpu":
        grads = _flash_cpu_backward(gradient, q, k, v, out, lse, 0.0, causal, scale=scale)
    elif _has_flash(q):
        # Of a dropout that there is not; the kernel asks for room only.
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        sizes = (q.shape[2], k.shape[2])
        grads = _flash_backward(
            gradient, q, k, v, out, lse, None, None, *sizes, 0.0, causal, seed, torch.empty_like(seed), scale=scale
        )
    else:
        grads = _formula_backward(gradient, q, k, v, out, lse, causal, scale)
    d_q, d_k, d_v = grads
    return d_q, _folded(d_k, kv_heads), _folded(d_v, kv_heads)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of the keys as one: outputs weighed by their share of the sum of exponentials. In fp32."""
    both = torch.logaddexp(lse, more_lse)
    old, new = (lse - both).exp().unsqueeze(-1), (more_lse - both).exp().unsqueeze(-1)
    return out * old + more.float() * new, both


def _has_flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x.contiguous() if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _folded(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(dim=2)  # type: ignore[no-untyped-call]


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = (q @ k.transpose(-2, -1)).float() * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _formula(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, scale)
    return scores.softmax(dim=-1).to(v.dtype) @ v, scores.logsumexp(dim=-1)


def _formula_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    p = (_scores(q, k, causal, scale) - lse.unsqueeze(-1)).exp()
    wide = gradient.float()
    d_p = wide @ v.float().transpose(-2, -1)
    d_scores = p * (d_p - (wide * out.float()).sum(dim=-1, keepdim=True)) * scale
    d_q, d_k = d_scores @ k.float(), d_scores.transpose(-2, -1) @ q.float()
    return d_q.to(q.dtype), d_k.to(k.dtype), (p.transpose(-2, -1) @ wide).to(v.dtype)
