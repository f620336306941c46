"""Self-attention with one fused projection for queries, keys and values.

Rows of the projection are grouped by key-value head: the queries that share it, its key, its value. An even split of
the rows over ranks therefore gives each rank complete groups. GPT-NeoX's layout is the special case of one query each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.kernels.attention import Mask, ScoreOptions, alibi_slopes, attend
from piledriver.models.attention.cache import AttentionCache
from piledriver.models.attention.rotary import apply_rotary
from piledriver.models.config import ModelConfig
from piledriver.models.layers import LayerNorm, Linear, RMSNorm, norm_of


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        # Chunks are documents of their own to a kernel, not a window.
        self.window = None if config.chunked_attention else config.window_of(layer)
        self.group = config.heads // config.kv_heads
        self.qkv = Linear(config.dim, config.kv_heads * (self.group + 2) * config.head_dim, bias=config.qkv_bias)
        self.out = Linear(config.heads * config.head_dim, config.dim, bias=config.out_bias)
        self.q_norm, self.k_norm = _qk_norms(config)
        self.norm_after_rope = config.qk_norm == "after_rope" and config.rope_of(layer) is not None
        self.sinks = nn.Parameter(torch.empty(config.heads)) if config.attention_sinks else None
        # Context parallelism replaces the kernel: a rank then holds a part of the heads or of the sequence.
        self.kernel: Callable[..., Tensor] = attend
        self._alibi: Tensor | None = None

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None,
        mask: Mask,
        cache: AttentionCache | None = None,
        positions: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> Tensor:
        """Return attention over [batch, time, dim]; `positions` are the cache positions of these tokens.

        `rotary` is the table of these tokens, None for no rotation; `temperature` ([batch or 1, time, 1]) multiplies
        queries.
        """
        config = self.config
        projected = self.qkv(x)
        # Read the shape after the projection: under sequence parallelism its input is a part of the sequence.
        batch, time, _ = projected.shape
        # The number of heads is inferred: under tensor parallelism a rank holds a part of them.
        grouped = projected.view(batch, time, -1, self.group + 2, config.head_dim)
        q, k, v = torch.split(grouped, [self.group, 1, 1], dim=3)
        q, k, v = q.reshape(batch, time, -1, config.head_dim), k.squeeze(3), v.squeeze(3)
        q, k = self._normalise(q, k)
        if config.clip_qkv is not None:
            q, k, v = (part.clamp(-config.clip_qkv, config.clip_qkv) for part in (q, k, v))
        if rotary is not None:
            q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        if self.norm_after_rope:
            q, k = (F.rms_norm(part, (config.head_dim,), None, config.norm_eps) for part in (q, k))
        if temperature is not None:
            q = (q * temperature.unsqueeze(-1)).to(q.dtype)
        if v.is_cuda and torch.is_grad_enabled():
            # A view would keep the whole projection alive for backward, besides the rotated queries and keys.
            v = v.contiguous()
        if cache is not None:
            assert positions is not None
            scores = ScoreOptions(
                config.attention_scale, self.window, config.attention_softcap, self._slopes(q), self.sinks
            )
            out = cache.attend(self.layer, q, k, v, mask, positions, scores)
        else:
            # Passed only where there are any: kernels of other packages need not know them.
            sinks = {} if self.sinks is None else {"sinks": self.sinks}
            out = self.kernel(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                mask,
                scale=config.attention_scale,
                window=self.window,
                softcap=config.attention_softcap,
                slopes=self._slopes(q) if mask.block is not None else None,
                **sinks,
            ).transpose(1, 2)
        mixed: Tensor = self.out(out.reshape(batch, time, -1))
        return mixed

    def _normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self.config.qk_norm != "full":
            return self.q_norm(q), self.k_norm(k)
        return self.q_norm(q.flatten(2)).view_as(q), self.k_norm(k.flatten(2)).view_as(k)

    def _slopes(self, q: Tensor) -> Tensor | None:
        """Return ALiBi's slopes on the queries' device, made once: a captured graph cannot copy from the host."""
        if self.config.positions != "alibi":
            return None
        if self._alibi is None or self._alibi.device != q.device:
            self._alibi = torch.tensor(alibi_slopes(self.config.heads), device=q.device)
        return self._alibi


QKNorm = RMSNorm | LayerNorm | None


def _qk_norms(config: ModelConfig) -> tuple[QKNorm, QKNorm]:
    if config.qk_norm in ("none", "after_rope"):
        return None, None
    if config.qk_norm == "head":
        bias = config.norm_bias
        return norm_of(config, config.head_dim, bias=bias), norm_of(config, config.head_dim, bias=bias)
    if config.qk_norm == "per_head":
        return norm_of(config, (config.heads, config.head_dim)), norm_of(config, (config.kv_heads, config.head_dim))
    return norm_of(config, config.heads * config.head_dim), norm_of(config, config.kv_heads * config.head_dim)
