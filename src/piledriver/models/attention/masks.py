"""Attention masks: built once per batch, outside the compiled region, and shared by all blocks.

Packed rows hold several documents. `document_ids` ([batch, time], any integers, equal and adjacent within a document)
become variable-length boundaries or a block mask on a GPU, and an equal dense mask on a CPU. Positions restart with
each document, so that a document gives the same result in a packed row as alone.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from piledriver.core.errors import UsageError
from piledriver.models.attention.alibi import alibi_slopes
from piledriver.models.config import ModelConfig
from piledriver.models.torch_private import compiled_block_mask

Backend = Literal["auto", "dense", "varlen", "flex"]


class Mask(NamedTuple):
    """Mask of a kind of block: dense, variable-length boundaries, a block mask, or nothing (plain causal)."""

    dense: Tensor | None = None
    """Boolean (true: attend) or additive, broadcastable to [batch, heads, queries, keys]."""
    boundaries: Tensor | None = None
    """[documents + 1] int32: start of each document in the flattened batch, then the end, repeated as padding."""
    block: BlockMask | None = None
    """Block mask of flex attention."""


class Masks(NamedTuple):
    """Masks and positions of a batch. The defaults are those of plain causal attention."""

    full: Mask = Mask()
    """Mask of blocks with full attention."""
    windowed: Mask = Mask()
    """Mask of blocks with a sliding window."""
    positions: Tensor | None = None
    """[batch, time]: position of each token in its document; None for 0, 1, 2, ..."""

    def of(self, window: int | None) -> Mask:
        """Return the mask of a block with or without a sliding window."""
        return self.full if window is None else self.windowed


def make_masks(
    config: ModelConfig,
    length: int,
    device: torch.device | str,
    document_ids: Tensor | None = None,
    *,
    backend: Backend = "auto",
    max_documents: int | None = None,
) -> Masks:
    """Return the masks of a batch of rows of `length` tokens.

    `max_documents` bounds the documents of the whole batch (variable-length attention only): with it, counting them
    needs no host synchronisation.
    """
    device = torch.device(device)
    positions = None if document_ids is None else positions_in_documents(document_ids)
    windows = {config.window_of(layer) for layer in range(config.layers)}
    made: dict[int | None, Mask] = {}
    for window in windows:
        effective = None if window is not None and window >= length else window
        made[window] = _mask(config, length, device, document_ids, effective, backend, max_documents)
    windowed = next((mask for window, mask in made.items() if window is not None), Mask())
    return Masks(made.get(None, Mask()), windowed, positions)


def _mask(
    config: ModelConfig,
    length: int,
    device: torch.device,
    ids: Tensor | None,
    window: int | None,
    backend: Backend,
    max_documents: int | None,
) -> Mask:
    scored = config.positions == "alibi" or config.attention_softcap is not None
    if backend == "auto":
        plain = ids is None and window is None and not scored
        on_gpu: Backend = "flex" if scored or ids is None else "varlen"
        backend = "dense" if plain or device.type != "cuda" else on_gpu
    if backend == "varlen":
        if scored or ids is None:
            raise UsageError(
                "backend varlen needs document_ids and supports neither ALiBi nor soft-capping",
                fix="use backend='flex'",
            )
        return Mask(boundaries=document_boundaries(ids, max_documents))
    if backend == "flex":
        return Mask(block=_block_mask(length, device, ids, window))
    return Mask(dense=_dense_mask(config, length, device, ids, window))


def positions_in_documents(ids: Tensor) -> Tensor:
    """Return [batch, time]: 0, 1, 2, ... from the start of each document of each row.

    >>> positions_in_documents(torch.tensor([[7, 7, 9, 9, 9]]))
    tensor([[0, 1, 0, 1, 2]])
    """
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    starts = torch.where(_starts(ids), places, 0)
    return places - starts.cummax(dim=1).values


def document_boundaries(ids: Tensor, max_documents: int | None = None) -> Tensor:
    """Return the start of each document in the flattened batch, padded with the end to a length that rarely changes.

    >>> document_boundaries(torch.tensor([[7, 7, 9], [1, 1, 1]]), max_documents=4)
    tensor([0, 2, 3, 6, 6], dtype=torch.int32)
    """
    starts = _starts(ids).flatten()
    if max_documents is None:
        # A power of two, so that compiled kernels see few different shapes.
        max_documents = 1 << max(int(starts.sum()) - 1, 1).bit_length()
    tokens = starts.numel()
    document = starts.long().cumsum(0) - 1
    boundaries = torch.full((max_documents + 1,), tokens, dtype=torch.int64, device=ids.device)
    boundaries.scatter_reduce_(0, document, torch.arange(tokens, device=ids.device), "amin")
    return boundaries.int()


def _starts(ids: Tensor) -> Tensor:
    first = torch.ones_like(ids[:, :1], dtype=torch.bool)
    return torch.cat((first, ids[:, 1:] != ids[:, :-1]), dim=1)


def _document_numbers(ids: Tensor) -> Tensor:
    # A loader may repeat an id later in the row (a document cut in two): adjacency decides, not the id.
    return _starts(ids).int().cumsum(dim=1)


def _dense_mask(
    config: ModelConfig, length: int, device: torch.device, ids: Tensor | None, window: int | None
) -> Tensor | None:
    if ids is None and window is None and config.positions != "alibi":
        return None
    places = torch.arange(length, device=device)
    distance = places[:, None] - places[None, :]
    allowed = (distance >= 0)[None, None]
    if window is not None:
        allowed = allowed & (distance < window)
    if ids is not None:
        numbers = _document_numbers(ids)
        allowed = allowed & (numbers[:, None, :, None] == numbers[:, None, None, :])
    return _with_slopes(config, allowed, distance[None, None])


def cache_mask(config: ModelConfig, positions: Tensor, cache_length: int, window: int | None) -> Tensor:
    """Return [batch, 1 or heads, time, cache_length]: which cache entries tokens at these positions attend to."""
    keys = torch.arange(cache_length, device=positions.device)
    distance = positions[:, None, :, None] - keys
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window)
    return _with_slopes(config, allowed, distance)


def _with_slopes(config: ModelConfig, allowed: Tensor, distance: Tensor) -> Tensor:
    if config.positions != "alibi":
        return allowed
    slopes = torch.tensor(alibi_slopes(config.heads), device=allowed.device)[None, :, None, None]
    return torch.where(allowed, -slopes * distance, -torch.inf)


def _block_mask(length: int, device: torch.device, ids: Tensor | None, window: int | None) -> BlockMask:
    numbers = None if ids is None else _document_numbers(ids)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = query >= key
        if window is not None:
            allowed = allowed & (query - key < window)
        if numbers is not None:
            allowed = allowed & (numbers[batch, query] == numbers[batch, key])
        return allowed

    batch = None if ids is None else ids.shape[0]
    if device.type == "cuda":
        return compiled_block_mask(attends, batch, length, str(device))
    return create_block_mask(attends, batch, None, length, length, device=str(device))
