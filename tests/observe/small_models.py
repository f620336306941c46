"""A small transformer with named parts, for profiles."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + torch.as_tensor(self.down(functional.gelu(self.up(x))))


class SmallModel(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2, vocabulary: int = 64, *, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)
        self.recompute = recompute

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return torch.as_tensor(self.head(x))


def closed_form_flops(batch: int, length: int, width: int, layers: int, vocabulary: int) -> int:
    """Forward FLOPs: every matrix product and both products of attention."""
    tokens = batch * length
    block = 2 * tokens * width * (3 * width + width + 8 * width) + 2 * 2 * batch * length * length * width
    return layers * block + 2 * tokens * width * vocabulary
