"""Multi-head latent attention (DeepSeek-AI, DeepSeek-V2, 2024).

Keys and values of all heads are projected from one latent vector per token, and one rotated key is shared by all heads.
A cache holds these two alone: attention with a cache is multi-query attention of the latent vectors, with the
projection of keys moved to the queries and that of values to the output, which is the same function. Queries keep their
rotated dimensions first, as the rotary table expects; the interchange permutes rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.kernels.attention import Mask, ScoreOptions, attend
from piledriver.models.attention.cache import AttentionCache
from piledriver.models.attention.rotary import apply_rotary
from piledriver.models.config import ModelConfig
from piledriver.models.layers import Linear, RMSNorm


class LatentAttention(nn.Module):
    """Attention whose keys and values come from a latent vector."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.latent is not None
        self.config, self.layer, self.latent = config, layer, config.latent
        self.window = None if config.chunked_attention else config.window_of(layer)
        latent, bias = config.latent, config.qkv_bias
        self.q_a: Linear | None = None
        self.q_a_norm: RMSNorm | None = None
        if latent.q_rank is not None:
            self.q_a = Linear(config.dim, latent.q_rank, bias=bias)
            self.q_a_norm = RMSNorm(latent.q_rank, latent.norm_eps)
        self.q_b = Linear(latent.q_rank or config.dim, config.heads * config.head_dim, bias=False)
        self.kv_a = Linear(config.dim, latent.kv_rank + latent.rope_dim, bias=bias)
        self.kv_a_norm = RMSNorm(latent.kv_rank, latent.norm_eps)
        self.plain_dim = config.head_dim - latent.rope_dim
        self.kv_b = Linear(latent.kv_rank, config.heads * (self.plain_dim + latent.value_dim), bias=False)
        self.out = Linear(config.heads * latent.value_dim, config.dim, bias=config.out_bias)
        # Context parallelism replaces the kernel, tensor parallelism what passes the shared key to a rank's heads.
        self.kernel: Callable[..., Tensor] = attend
        self.share_key: Callable[[Tensor], Tensor] = _identity

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None,
        mask: Mask,
        cache: AttentionCache | None = None,
        positions: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> Tensor:
        """Return attention over [batch, time, dim]; arguments as of `Attention`."""
        latent, rope_dim = self.latent, self.latent.rope_dim
        q = x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x))
        q = torch.unflatten(self.q_b(q), -1, (-1, self.config.head_dim))
        batch, time = q.shape[:2]
        compressed, key = torch.split(self.kv_a(x), [latent.kv_rank, rope_dim], dim=-1)
        compressed, key = self.kv_a_norm(compressed), self.share_key(key).unsqueeze(2)
        if rotary is not None:
            q, key = apply_rotary(q, rotary), apply_rotary(key, rotary)
        if temperature is not None:
            q = (q * temperature.unsqueeze(-1)).to(q.dtype)
        if cache is None:
            out = self._over_sequence(q, compressed, key, mask)
        else:
            out = self._over_cache(q, compressed, key, mask, cache, positions)
        mixed: Tensor = self.out(out.reshape(batch, time, -1))
        return mixed

    def _over_sequence(self, q: Tensor, compressed: Tensor, key: Tensor, mask: Mask) -> Tensor:
        """Return attention with keys and values of every head, [batch, time, heads, value_dim]."""
        expanded = torch.unflatten(self.kv_b(compressed), -1, (-1, self.plain_dim + self.latent.value_dim))
        plain, v = torch.split(expanded, [self.plain_dim, self.latent.value_dim], dim=-1)
        k = torch.cat((key.expand(-1, -1, plain.shape[2], -1), plain), dim=-1)
        scale, window, softcap, *_ = self._scores()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = self.kernel(q, k, v, mask, scale=scale, window=window, softcap=softcap, slopes=None)
        return out.transpose(1, 2)

    def _over_cache(
        self,
        q: Tensor,
        compressed: Tensor,
        key: Tensor,
        mask: Mask,
        cache: AttentionCache,
        positions: Tensor | None,
    ) -> Tensor:
        """Return the same over latent vectors: one head, keys [key, latent], values [latent, zeros]."""
        assert positions is not None
        turned, plain = torch.split(q, [self.latent.rope_dim, self.plain_dim], dim=-1)
        by_head = torch.unflatten(self.kv_b.weight.to(q.dtype), 0, (-1, self.plain_dim + self.latent.value_dim))
        to_keys, to_values = torch.split(by_head, [self.plain_dim, self.latent.value_dim], dim=1)
        q = torch.cat((turned, torch.einsum("bthp,hpr->bthr", plain, to_keys)), dim=-1)
        latent = compressed.unsqueeze(2)
        values = F.pad(latent, (0, self.latent.rope_dim))
        out = cache.attend(self.layer, q, torch.cat((key, latent), dim=-1), values, mask, positions, self._scores())
        return torch.einsum("bthr,hvr->bthv", out[..., : self.latent.kv_rank], to_values)

    def _scores(self) -> ScoreOptions:
        return ScoreOptions(self.config.attention_scale, self.window, self.config.attention_softcap)


def _identity(x: Tensor) -> Tensor:
    return x
