"""softmax(q k^T) v, by the fastest kernel that the mask allows. All of them agree; tests hold them to it.

q is [batch, heads, time, head_dim]; k and v have kv_heads heads, each shared by heads / kv_heads queries.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn

from piledriver.models.attention.masks import Mask

# The signature grew between torch releases; what is missing is made up for below.
_VARLEN_ACCEPTS = frozenset(inspect.signature(varlen_attn).parameters)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Attention of every query over the keys that `mask` lets it see; causal where the mask is empty.

    `window` and `slopes` restate for the GPU kernels what a dense mask holds already.
    """
    if mask.block is not None:
        return _flex(q, k, v, mask, scale, softcap, slopes)
    if mask.boundaries is not None:
        return _varlen(q, k, v, mask.boundaries, scale, window)
    if softcap is not None:
        return _by_hand(q, k, v, mask.dense, scale, softcap)
    dense = mask.dense
    if dense is not None and dense.dtype != torch.bool:
        dense = dense.to(q.dtype)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=dense, is_causal=dense is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _by_hand(q: Tensor, k: Tensor, v: Tensor, dense: Tensor | None, scale: float, softcap: float) -> Tensor:
    """The formula itself: where no kernel knows soft-capping."""
    k, v = _repeat(k, q.shape[1]), _repeat(v, q.shape[1])
    scores = softcap * torch.tanh((q @ k.transpose(-2, -1)).float() * (scale / softcap))
    if dense is None:
        dense = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    capped = scores.masked_fill(~dense, -torch.inf) if dense.dtype == torch.bool else scores + dense
    return capped.softmax(dim=-1).to(v.dtype) @ v


def _varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float, window: int | None) -> Tensor:
    batch, heads, time, _ = q.shape
    options: dict[str, Any] = {}
    if "window_size" in _VARLEN_ACCEPTS:
        options["window_size"] = (-1 if window is None else window - 1, 0)
    else:
        options["is_causal"] = True
    if "scale" in _VARLEN_ACCEPTS:
        options["scale"] = scale
    else:
        q = q * (scale * q.shape[-1] ** 0.5)
    if k.shape[1] != heads:
        if "enable_gqa" in _VARLEN_ACCEPTS:
            options["enable_gqa"] = True
        else:
            k, v = _repeat(k, heads), _repeat(v, heads)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = varlen_attn(q, k, v, boundaries, boundaries, time, time, **options)
    return cast(Tensor, out).view(batch, time, heads, -1).transpose(1, 2)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float | None, slopes: Tensor | None
) -> Tensor:
    def change(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[head] * (query - key)
        return score

    # Outside a compiled model the GPU kernel exists only through the compiler; on a CPU the plain formula runs.
    compiled = q.is_cuda and not torch.compiler.is_compiling()
    kernel: Any = _compiled_flex() if compiled else flex_attention
    out = kernel(
        q,
        k,
        v,
        score_mod=None if softcap is None and slopes is None else change,
        block_mask=mask.block,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return cast(Tensor, out)


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention)


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
