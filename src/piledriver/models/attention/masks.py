"""The masks of a batch: built once, outside the compiled region, and shared by all blocks.

Packed rows hold several documents, given as `document_ids` ([batch, time] integers, equal and adjacent within a
document). No token attends to another document, and positions start again with each: a document gives the same result
in a packed row as alone. The form of the masks follows from the attention kernel that will read them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from piledriver.kernels.attention import (
    AttentionKernel,
    Mask,
    alibi_slopes,
    build_mask,
    choose_kernel,
    dense_mask,
    positions_in_documents,
)
from piledriver.models.config import ModelConfig


class Masks(NamedTuple):
    """Masks and positions of a batch. The defaults are those of plain causal attention."""

    full: Mask = Mask()
    """Mask of blocks with full attention."""
    windowed: Mask = Mask()
    """Mask of blocks with a sliding window."""
    positions: Tensor | None = None
    """[batch, time]: the position of each token in its document; None for 0, 1, 2, ..."""

    def of(self, window: int | None) -> Mask:
        """Return the mask of a block with or without a sliding window."""
        return self.full if window is None else self.windowed


def make_masks(
    config: ModelConfig,
    length: int,
    device: torch.device | str,
    document_ids: Tensor | None = None,
    *,
    kernel: str | AttentionKernel = "auto",
    max_documents: int | None = None,
) -> Masks:
    """Return the masks of a batch of rows of `length` tokens.

    `kernel` is `auto`, a name in `piledriver.kernels.attention.ATTENTION`, or such a kernel. `max_documents` bounds the
    documents in the whole batch (variable-length attention only): with it, the device need not be asked.
    """
    device = torch.device(device)
    positions = None if document_ids is None else positions_in_documents(document_ids)
    windows = {config.window_of(layer) for layer in range(config.layers)}
    made: dict[int | None, Mask] = {}
    for window in windows:
        effective = None if window is not None and window >= length else window
        if effective is not None and config.chunked_attention:
            chunks = _chunks(effective, length, device, positions)
            made[window] = _mask(config, length, device, chunks, None, kernel, None, by_row=document_ids is not None)
        else:
            made[window] = _mask(config, length, device, document_ids, effective, kernel, max_documents)
    windowed = next((mask for window, mask in made.items() if window is not None), Mask())
    return Masks(made.get(None, Mask()), windowed, positions)


def _chunks(chunk: int, length: int, device: torch.device, positions: Tensor | None) -> Tensor:
    """Return document ids whose documents are chunks, [1 or batch, time]; chunks restart with each document."""
    if positions is None:
        return (torch.arange(length, device=device) // chunk).unsqueeze(0)
    return (positions % chunk == 0).long().cumsum(dim=1)


def _mask(
    config: ModelConfig,
    length: int,
    device: torch.device,
    document_ids: Tensor | None,
    window: int | None,
    kernel: str | AttentionKernel,
    max_documents: int | None,
    *,
    by_row: bool = True,
) -> Mask:
    """Return one mask; without `by_row` the ids of a single row stand for every row, which boundaries cannot say."""
    chosen = choose_kernel(
        kernel,
        device,
        documents=document_ids is not None and by_row,
        window=window is not None or not by_row,
        alibi=config.positions == "alibi",
        softcap=config.attention_softcap is not None,
        sinks=config.attention_sinks,
    )
    mask = build_mask(
        chosen.mask_form,
        length,
        device,
        document_ids,
        window=window,
        slopes=_slopes(config),
        max_documents=max_documents,
    )
    return mask if kernel == "auto" else mask._replace(kernel=chosen)


def cache_mask(config: ModelConfig, positions: Tensor, cache_length: int, window: int | None) -> Tensor:
    """Return [batch, 1 or heads, time, cache_length]: what tokens at these positions may read of a cache."""
    places = torch.arange(cache_length, device=positions.device)
    distance = positions[:, None, :, None] - places
    if window is not None and config.chunked_attention:
        same = positions[:, None, :, None] // window == places // window
        return dense_mask(distance, slopes=_slopes(config), same_document=same)
    return dense_mask(distance, window=window, slopes=_slopes(config))


def _slopes(config: ModelConfig) -> list[float] | None:
    return alibi_slopes(config.heads) if config.positions == "alibi" else None
