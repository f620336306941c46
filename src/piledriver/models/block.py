"""Transformer block: attention and MLP with residual connections."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from piledriver.kernels.attention import Mask
from piledriver.models.attention.cache import AttentionCache
from piledriver.models.attention.layer import Attention
from piledriver.models.config import ModelConfig
from piledriver.models.feed_forward.mlp import GatedMLP, PlainMLP
from piledriver.models.feed_forward.moe import MoE
from piledriver.models.layers import make_norm


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Optionally post-norm, or both in parallel."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.post, self.parallel = config.norm_placement == "post", config.parallel_residual
        self.window = config.window_of(layer)
        self.recompute_norms = False
        self.attention = Attention(config, layer)
        self.attention_norm = make_norm(config)
        self.mlp = make_mlp(config)
        self.mlp_norm = make_norm(config)

    def forward(
        self,
        x: Tensor,
        rotary: Tensor | None,
        mask: Mask,
        cache: AttentionCache | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the new residual stream, and the load-balance loss of a mixture of experts (else None)."""
        attended = self.attention(
            x if self.post else self._before(self.attention_norm, x), rotary, mask, cache, positions
        )
        if self.post:
            attended = self.attention_norm(attended)
        middle = x if self.parallel else x + attended
        out, balance = self._mlp(middle if self.post else self._before(self.mlp_norm, middle))
        if self.post:
            out = self.mlp_norm(out)
        return (x + attended + out if self.parallel else middle + out), balance

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Return the normalised input of a sublayer; with `recompute_norms` a compiled backward recomputes it."""
        if self.recompute_norms and torch.is_grad_enabled() and torch.compiler.is_compiling():
            return cast(Tensor, checkpoint(norm, x, use_reentrant=False))
        return cast(Tensor, norm(x))

    def _mlp(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.mlp, MoE):
            out, balance = self.mlp(x)
            return out, balance
        return self.mlp(x), None


def make_mlp(config: ModelConfig) -> nn.Module:
    """Return the MLP or the mixture of experts that the config asks for."""
    if config.moe is not None:
        return MoE(config)
    return GatedMLP(config) if config.mlp == "gated" else PlainMLP(config)
