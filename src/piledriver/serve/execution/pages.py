"""The paged KV cache: pages of every layer, and the attention layer's view of them during a step."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.kernels.attention import Mask, ScoreOptions
from piledriver.kernels.paged_attention import PagedBatch, allocate_pages, page_bytes, paged_attention, write_pages
from piledriver.models import Masks, ModelConfig


class PagedCache:
    """[blocks, heads, block_size, width] keys and values of each layer (`config.cache_shape`); an `AttentionCache`.

    One block more than the scheduler knows is the scratch block, which padding tokens write to.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        *,
        length: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        ranks: tuple[int, int] = (0, 1),
    ) -> None:
        """Allocate pages for the heads of one rank; `ranks` is this rank and the number of those that share them."""
        check_servable(config, length)
        heads, width = local_cache_shape(config, ranks[1])
        self.ranks = ranks
        shape = (blocks + 1, heads, block_size, width)
        self.length, self.block_size, self.scratch_block = length, block_size, blocks
        self.keys = [allocate_pages(*shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [allocate_pages(*shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.batch: PagedBatch | None = None
        """The sequences of the step that is running."""

    def masks(self, config: ModelConfig, positions: Tensor) -> Masks:
        """Return positions only: the kernel masks by position."""
        return Masks(positions=positions)

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
        """Write [1, tokens, heads, width] to the pages of this step's sequences, then attend over them."""
        assert self.batch is not None, "set `batch` before the forward pass"
        keys, values = self.keys[layer], self.values[layer]
        write_pages(keys, values, k[0], v[0], self.batch.slots)
        if scores.slopes is not None and self.ranks[1] > 1:
            scores = scores._replace(slopes=scores.slopes.narrow(0, self.ranks[0] * q.shape[2], q.shape[2]))
        return paged_attention(q[0], keys, values, self.batch, scores)[None]


def local_cache_shape(config: ModelConfig, ranks: int) -> tuple[int, int]:
    """Return heads and width of the cache on one of several ranks; the one head of latent attention is on each."""
    heads, width = config.cache_shape
    return (heads if config.latent is not None else heads // ranks), width


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype, ranks: int = 1) -> int:
    """Return the bytes of one block over all layers, on one of several ranks."""
    heads, width = local_cache_shape(config, ranks)
    return 2 * config.layers * heads * page_bytes(block_size, width, dtype)


def check_servable(config: ModelConfig, length: int) -> None:
    """Raise `UsageError` for what depends on more of a sequence than the positions of the tokens of a step."""
    scaling = config.rope_scaling
    if config.chunked_attention:
        raise UsageError(
            "chunked attention (Llama 4) has no paged kernel", fix="generate with `piledriver.models.decoding`"
        )
    if scaling is not None and scaling.depends_on_length and length > scaling.original_max_positions:
        raise UsageError(
            f"{scaling.kind} rotary scaling changes with the length of a sequence beyond "
            f"{scaling.original_max_positions} tokens, and a step holds several sequences",
            fix=f"limit sequences to {scaling.original_max_positions} tokens",
        )
