"""Self-attention with one fused projection for queries, keys and values.

Rows of the projection are grouped by key-value head: the queries that share it, its key, its value. An even split of
the rows over ranks therefore gives each rank complete groups. GPT-NeoX's layout is the special case of one query each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from piledriver.kernels.attention import Mask, alibi_slopes, attend
from piledriver.models.attention.cache import AttentionCache
from piledriver.models.attention.rotary import apply_rotary
from piledriver.models.config import ModelConfig
from piledriver.models.layers import Linear, RMSNorm


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.window = config.window_of(layer)
        self.group = config.heads // config.kv_heads
        self.qkv = Linear(config.dim, config.kv_heads * (self.group + 2) * config.head_dim, bias=config.qkv_bias)
        self.out = Linear(config.heads * config.head_dim, config.dim, bias=config.out_bias)
        self.q_norm, self.k_norm = _qk_norms(config)
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
    ) -> Tensor:
        """Return attention over [batch, time, dim]; `positions` are the cache positions of these tokens."""
        config = self.config
        projected = self.qkv(x)
        # Read the shape after the projection: under sequence parallelism its input is a part of the sequence.
        batch, time, _ = projected.shape
        # The number of heads is inferred: under tensor parallelism a rank holds a part of them.
        grouped = projected.view(batch, time, -1, self.group + 2, config.head_dim)
        if config.clip_qkv is not None:
            grouped = grouped.clamp(-config.clip_qkv, config.clip_qkv)
        q, k, v = torch.split(grouped, [self.group, 1, 1], dim=3)
        q, k, v = q.reshape(batch, time, -1, config.head_dim), k.squeeze(3), v.squeeze(3)
        q, k = self._normalise(q, k)
        if rotary is not None:
            q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        if v.is_cuda and torch.is_grad_enabled():
            # A view would keep the whole projection alive for backward, besides the rotated queries and keys.
            v = v.contiguous()
        if cache is not None:
            assert positions is not None
            out = cache.attend(
                self.layer,
                q,
                k,
                v,
                mask,
                positions,
                scale=config.attention_scale,
                window=self.window,
                softcap=config.attention_softcap,
                slopes=self._slopes(q),
            )
        else:
            out = self.kernel(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                mask,
                scale=config.attention_scale,
                window=self.window,
                softcap=config.attention_softcap,
                slopes=self._slopes(q) if mask.block is not None else None,
            ).transpose(1, 2)
        mixed: Tensor = self.out(out.reshape(batch, time, -1))
        return mixed

    def _normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self.config.qk_norm == "head":
            return self.q_norm(q), self.k_norm(k)
        return self.q_norm(q.flatten(2)).view_as(q), self.k_norm(k.flatten(2)).view_as(k)

    def _slopes(self, q: Tensor) -> Tensor | None:
        """Return ALiBi's slopes on the queries' device, made once: a captured graph cannot copy from the host."""
        if self.config.positions != "alibi":
            return None
        if self._alibi is None or self._alibi.device != q.device:
            self._alibi = torch.tensor(alibi_slopes(self.config.heads), device=q.device)
        return self._alibi


def _qk_norms(config: ModelConfig) -> tuple[RMSNorm | None, RMSNorm | None]:
    if config.qk_norm == "none":
        return None, None
    if config.qk_norm == "head":
        return RMSNorm(config.head_dim, config.norm_eps), RMSNorm(config.head_dim, config.norm_eps)
    q_dim, k_dim = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return RMSNorm(q_dim, config.norm_eps), RMSNorm(k_dim, config.norm_eps)
