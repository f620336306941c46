"""KV caches: the interface between attention layers and what holds the keys and values of earlier tokens.

A layer gives a cache its new queries, keys and values, and gets the attention over everything that the cache holds for
their sequences. `KVCache` has static shapes, so that one compiled decode step serves every position; rows of a batch
may be at different positions. The paged cache of `serve` is another implementation.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from piledriver.kernels.attention import Mask, ScoreOptions, attend
from piledriver.models.attention.masks import Masks, cache_mask
from piledriver.models.config import ModelConfig


class AttentionCache(Protocol):
    """What an attention layer asks of a cache."""

    length: int
    """Most tokens of one sequence."""

    def masks(self, config: ModelConfig, positions: Tensor) -> Masks:
        """Return what `attend` will need of tokens at these [batch, time] positions, once for all layers."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        positions: Tensor,
        scores: ScoreOptions,
    ) -> Tensor:
        """Store [batch, time, heads, width] keys and values (`config.cache_shape`); return the attention over all."""


class KVCache:
    """One pair of [batch, heads, length, width] tensors per block, where (heads, width) is `config.cache_shape`."""

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        length: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        heads, width = config.cache_shape
        shape = (batch, heads, length, width)
        self.length = length
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]

    def masks(self, config: ModelConfig, positions: Tensor) -> Masks:
        """Return dense masks over the whole length: entries after a position are stale until they are overwritten."""
        windows = {config.window_of(layer) for layer in range(config.layers)}
        made = {w: Mask(dense=cache_mask(config, positions, self.length, w)) for w in windows}
        windowed = next((mask for window, mask in made.items() if window is not None), Mask())
        return Masks(made.get(None, Mask()), windowed, positions)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        positions: Tensor,
        scores: ScoreOptions,
    ) -> Tensor:
        """Write at [batch, time] positions, and attend under the dense mask."""
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        for store, new in ((self.keys[layer], k), (self.values[layer], v)):
            store[rows, :, positions] = new.to(store.dtype)
        keys, values = self.keys[layer].to(k.dtype), self.values[layer].to(v.dtype)
        scale, window, softcap, _, sinks = scores  # the mask holds ALiBi's part
        q = q.transpose(1, 2)
        return attend(q, keys, values, mask, scale=scale, window=window, softcap=softcap, sinks=sinks).transpose(1, 2)
