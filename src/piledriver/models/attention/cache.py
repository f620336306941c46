"""KV cache with static shapes, for generation.

Static shapes let one compiled decode step serve every position. Rows of a batch may be at different positions, so that
sequences of different lengths share a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.models.config import ModelConfig


class KVCache:
    """One pair of [batch, kv_heads, length, head_dim] tensors per block."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (batch, config.kv_heads, length, config.head_dim)
        self.length = length
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]

    def update(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Write [batch, kv_heads, time, head_dim] at [batch, time] positions; return all keys and values of a layer.

        Entries after a row's position are stale: the attention mask hides them until they are overwritten.
        """
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        for store, new in ((self.keys[layer], k), (self.values[layer], v)):
            store[rows, :, positions] = new.transpose(1, 2).to(store.dtype)
        return self.keys[layer].to(k.dtype), self.values[layer].to(v.dtype)
