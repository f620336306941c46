"""Transformer block: attention and MLP with residual connections."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from piledriver.kernels.attention import Mask
from piledriver.models.attention.cache import AttentionCache
from piledriver.models.attention.latent import LatentAttention
from piledriver.models.attention.layer import Attention
from piledriver.models.config import ModelConfig
from piledriver.models.feed_forward.mlp import make_mlp
from piledriver.models.feed_forward.moe import MoE
from piledriver.models.layers import Linear, make_norm


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Optionally post-norm, norms on both sides, or both in parallel."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.post, self.parallel = config.norm_placement == "post", config.parallel_residual
        self.window, self.rope = config.window_of(layer), config.rope_of(layer)
        self.residual_scale = config.residual_scale
        self.recompute_norms = False
        self.attention = Attention(config, layer) if config.latent is None else LatentAttention(config, layer)
        self.attention_norm = make_norm(config)
        self.mlp: nn.Module = MoE(config) if config.has_experts(layer) else make_mlp(config)
        self.mlp_norm = None if config.shared_norm else make_norm(config)
        both = config.norm_placement == "both"
        self.attention_post_norm = make_norm(config) if both else None
        self.mlp_post_norm = make_norm(config) if both else None
        # Beside the experts, not among them: tensor parallelism and fp8 treat it like any other MLP.
        shared = config.moe if config.has_experts(layer) else None
        self.shared_mlp = make_mlp(config, shared.shared_dim) if shared is not None and shared.shared_dim else None
        self.shared_gate = Linear(config.dim, 1, bias=False) if shared is not None and shared.shared_gate else None

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None,
        mask: Mask,
        cache: AttentionCache | None = None,
        positions: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the new residual stream, and the load-balance loss of a mixture of experts (else None)."""
        inner = x if self.post else self._before(self.attention_norm, x)
        attended = self.attention(inner, rotary, mask, cache, positions, temperature)
        attended = self._after(self.attention_norm if self.post else self.attention_post_norm, attended)
        middle = x if self.parallel else x + attended
        if self.mlp_norm is not None:
            inner = middle if self.post else self._before(self.mlp_norm, middle)
        out, balance = self._mlp(inner)
        out = self._after(self.mlp_norm if self.post else self.mlp_post_norm, out)
        return (x + attended + out if self.parallel else middle + out), balance

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return the normalised input of a sublayer; with `recompute_norms` a compiled backward recomputes it."""
        if self.recompute_norms and torch.is_grad_enabled() and torch.compiler.is_compiling():
            return cast(Tensor, checkpoint(norm, x, use_reentrant=False))
        return cast(Tensor, norm(x))

    def _after(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        """Return what a sublayer adds to the residual stream."""
        x = x if norm is None else norm(x)
        return x if self.residual_scale == 1.0 else x * self.residual_scale

    def _mlp(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if not isinstance(self.mlp, MoE):
            return self.mlp(x), None
        out, balance = self.mlp(x)
        if self.shared_mlp is not None:
            shared = self.shared_mlp(x)
            out = out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)
        return out, balance
